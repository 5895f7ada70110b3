// What a JobSpec must be, before anything of it is believed.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string_view>
#include <unordered_set>

#include "transport/control/choices.h"
#include "transport/control/job_spec.h"
#include "transport/control/key_schedules.h"
#include "transport/control/message_fields.h"
#include "transport/control/rank_tree.h"
#include "transport/control/rules.h"
#include "transport/slot_format.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr uint32_t kMinLeaseMs = 10, kMaxLeaseMs = 3600 * 1000;
constexpr uint32_t kMaxLimitMs = 7u * 24 * 3600 * 1000;
constexpr std::string_view kNameCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

void check_number(std::string_view field, uint64_t value, uint64_t min, uint64_t max) {
  if (value < min || value > max) {
    fail(ErrorCode::kInvalid, "{}: must be from {} to {}, got {}", field, min, max, value);
  }
}

void check_key_name(const std::string& name, size_t i) {
  if (name.empty()) fail(ErrorCode::kInvalid, "keys[{}].name: must not be empty", i);
  if (name.size() > kMaxNameBytes) {
    fail(ErrorCode::kInvalid, "keys[{}].name: must have at most {} bytes, got {}", i, kMaxNameBytes,
         name.size());
  }
  const auto is_plain = [](char c) { return c > ' ' && c < 0x7f; };  // as nearly all names are
  if (!std::ranges::all_of(name, is_plain) && escaped(name) != name) {
    fail(ErrorCode::kInvalid,
         "keys[{}].name: must not hold control characters or invisible ones, got '{}'", i,
         printable(name));
  }
}

void check_shape(const KeySpec& key, size_t i) {
  if (key.shape.size() > kMaxKeyDimensions) {
    fail(ErrorCode::kInvalid, "keys[{}].shape: at most {} dimensions, got {}", i, kMaxKeyDimensions,
         key.shape.size());
  }
  if (key.shape.empty() || elements_in(key.shape) == key.elements) return;
  fail(ErrorCode::kInvalid,
       "keys[{}].shape: the product of [{}] must be the number of elements, which is {}", i,
       fmt::join(key.shape, ", "), key.elements);
}

// `value` is as the field has it.
void check_chunks(std::string_view field, const SlotFormat& format, std::string_view value,
                  uint32_t chunk_elements) {
  if (!format.is_sparse() || chunk_elements <= kTopKElements) return;
  fail(ErrorCode::kInvalid, "{}: {} is for chunks of at most {} elements, and these have {}", field,
       value, kTopKElements, chunk_elements);
}

void check_format(std::string_view field, std::string_view value, uint32_t chunk_elements,
                  bool of_results = false) {
  if (is_schedule(value) && !of_results) {
    const SlotFormat slot = FormatSchedule::parse(field, value).slot();
    for (size_t i = 0; i < kSlotFormats.size(); ++i) {
      if ((slot.any_of >> i & 1) != 0) check_chunks(field, kSlotFormats[i], value, chunk_elements);
    }
    return;
  }
  const SlotFormat* const format = find_slot_format(value);
  if (format == nullptr || (of_results && !format->for_results())) {
    std::vector<std::string_view> words;
    for (const SlotFormat& each : kSlotFormats) {
      if (!of_results || each.for_results()) words.push_back(each.name);
    }
    refuse_word(field, value, words);
  }
  check_chunks(field, *format, value, chunk_elements);
}

void check_tiles(const KeySpec& key, size_t i, const std::string& field) {
  if (key.shape.size() != 2) {
    fail(ErrorCode::kInvalid, "{}: needs the shape of a matrix, [rows, columns], got [{}]", field,
         fmt::join(key.shape, ", "));
  }
  check_number(fmt::format("keys[{}].shape[1]", i), key.shape[1], 1, kMaxTileColumns);
  const uint32_t most = most_tile_rows(key);
  if (most == 0) {
    fail(ErrorCode::kInvalid,
         "{}: {} for {} rows of {} columns are more than a chunk may have, which is {} elements; "
         "send the gradient as it is",
         field,
         key.rank_limit > 0 ? fmt::format("{} pairs of vectors", key.rank_limit) : "their elements",
         rows_together(key), key.shape[1], kMaxChunkElements);
  }
  if (key.tile_rows == 0) return;
  const bool whole = key.tile_rows >= key.shape[0] || key.tile_rows % rows_together(key) == 0;
  if (whole && key.tile_rows <= most) return;
  fail(ErrorCode::kInvalid, "keys[{}].tile_rows: must be a multiple of {} and at most {}, got {}",
       i, rows_together(key), most, key.tile_rows);
}

void check_format_of(const KeySpec& key, const std::string& field, std::string_view format,
                     bool of_racks) {
  if (of_racks) format = "f32";
  if (key.format == format || (key.format.empty() && of_racks)) return;
  fail(ErrorCode::kInvalid, "{}: needs format '{}', got '{}'", field, format,
       printable(key.format));
}

// Keys whose gradients are compact. Racks send whole sums, in f32, of the same chunks.
void check_compact(const KeySpec& key, size_t i, bool of_racks) {
  const auto field = [i](std::string_view name) { return fmt::format("keys[{}].{}", i, name); };
  if (key.rank_limit == 0 && (is_factors(key) || (key.tile_rows > 0 && !has_tiles(key)))) {
    fail(ErrorCode::kInvalid, "{}: must be from 1 to {} for {}, got 0", field("rank_limit"),
         kMaxRankLimit, is_factors(key) ? "format factors" : "tile_rows");
  }
  if (key.rows_limit == 0 && (is_rows(key) || key.lazy)) {
    fail(ErrorCode::kInvalid, "{}: must be from 1 to {} for {}, got 0", field("rows_limit"),
         kMaxRowsLimit, is_rows(key) ? "format rows" : "lazy");
  }
  if (!has_tiles(key)) return;
  if (key.rank_limit > 0 && key.rows_limit > 0) {
    check_number(field("rank_limit"), key.rank_limit, 1, kMaxRankLimit);
    if (key.lazy) {
      fail(ErrorCode::kInvalid,
           "{}: is {}, and so lazy must be false: a pair of vectors has something of every row",
           field("rank_limit"), key.rank_limit);
    }
    if (key.shape.size() == 2 && key.rows_limit != key.shape[0]) {
      fail(ErrorCode::kInvalid, "{}: is {}, and so rows_limit must be 0, or {}, all rows; got {}",
           field("rank_limit"), key.rank_limit, key.shape[0], key.rows_limit);
    }
  } else if (key.rank_limit > 0) {
    check_number(field("rank_limit"), key.rank_limit, 1, kMaxRankLimit);
    check_format_of(key, field("rank_limit"), kFactors, of_racks);
    return check_tiles(key, i, field("rank_limit"));
  }
  check_number(field("rows_limit"), key.rows_limit, 1, kMaxRowsLimit);
  check_format_of(key, field("rows_limit"), kRows, of_racks);
  check_tiles(key, i, field(key.rank_limit > 0 ? "rank_limit" : "rows_limit"));
}

void check_fold_of(const KeySpec& key, size_t i) {
  static constexpr std::string_view kTypes[] = {"f32", "f64", "i32", "i64"};
  static constexpr std::string_view kOperations[] = {"add", "multiply", "min", "max", "or"};
  const auto field = [i](std::string_view name) { return fmt::format("keys[{}].{}", i, name); };
  const auto check_word = [&field](std::string_view name, std::string_view value, auto& words) {
    if (std::ranges::find(words, value) != std::end(words)) return;
    refuse_word(field(name), value, {std::begin(words), std::end(words)});
  };
  const std::string_view type = value_type_of(key);
  check_word("operation", key.operation, kOperations);
  check_word("value_type", type, kTypes);
  if (key.operation == "or" && type.starts_with('f')) {
    fail(ErrorCode::kInvalid, "{}: 'or' is of whole numbers, and the values are {}",
         field("operation"), type);
  }
  const uint64_t together = key.shape.empty() ? key.elements : key.shape.back();
  if (type.ends_with("64") && together % 2 != 0) {
    fail(ErrorCode::kInvalid, "{}: a value of type {} is two elements, and {} are an odd number",
         field("value_type"), type, together);
  }
}

void check_folds(const JobSpec& spec) {
  if (folds(spec) && spec.optimizer == "none" && spec.consistency != Consistency::kBsp) {
    fail(ErrorCode::kInvalid,
         "keys[0].operation: with optimizer 'none' a result is the outcome of a round, and there "
         "are "
         "none with consistency '{}': choose bsp, or optimizer 'fold'",
         spec.consistency.word());
  }
  for (size_t i = 0; i < spec.keys.size(); ++i) {
    const KeySpec& key = spec.keys[i];
    if (folds(spec)) {
      check_fold_of(key, i);
    } else if (!key.operation.empty() || !key.value_type.empty()) {
      fail(ErrorCode::kInvalid,
           "keys[{}].{}: is for optimizer 'fold', or for all keys with 'none', and the job's is "
           "'{}'",
           i, key.operation.empty() ? "value_type" : "operation", printable(spec.optimizer));
    }
  }
}

void check_keys(const std::vector<KeySpec>& keys, uint32_t chunk_elements) {
  if (keys.empty()) fail(ErrorCode::kInvalid, "keys: a job needs at least one key");
  if (keys.size() > kMaxKeys) {
    fail(ErrorCode::kInvalid, "keys: at most {} keys, got {}", kMaxKeys, keys.size());
  }
  std::unordered_set<std::string_view> names;
  names.reserve(keys.size());
  uint64_t total = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const KeySpec& key = keys[i];
    check_key_name(key.name, i);
    if (!names.insert(key.name).second) {
      fail(ErrorCode::kInvalid, "keys[{}].name: '{}' is there twice", i, key.name);
    }
    if (key.elements == 0) {
      fail(ErrorCode::kInvalid, "keys[{}].elements: must be a positive integer, got 0", i);
    }
    if (key.elements > kMaxElements - total) {
      fail(ErrorCode::kInvalid, "keys[{}].elements: {} brings the job over {} elements", i,
           key.elements, kMaxElements);
    }
    total += key.elements;
    check_shape(key, i);
    if (key.group >= kMaxHyperGroups) {
      check_number(fmt::format("keys[{}].group", i), key.group, 0, kMaxHyperGroups - 1);
    }
    if (key.fragment >= kMaxFragments) {
      check_number(fmt::format("keys[{}].fragment", i), key.fragment, 0, kMaxFragments - 1);
    }
    if (!key.format.empty() && !is_compact(key)) {
      check_format(fmt::format("keys[{}].format", i), key.format, chunk_elements);
    }
    for (const auto& [field, value] :
         {std::pair{"lr_scale", key.lr_scale}, std::pair{"decay_scale", key.decay_scale}}) {
      if (!std::isfinite(value)) {
        fail(ErrorCode::kInvalid, "keys[{}].{}: must be finite, got {}", i, field, value);
      }
    }
  }
}

void check_fragments(const JobSpec& spec) {
  std::vector<const KeySpec*> of(fragments_of(spec));
  for (const KeySpec& key : spec.keys) of[key.fragment] = &key;
  for (size_t fragment = 0; fragment < of.size(); ++fragment) {
    if (of[fragment] != nullptr) continue;
    fail(ErrorCode::kInvalid,
         "keys: key '{}' is of fragment {}, and no key of fragment {}: number them without gaps",
         printable(of.back()->name), of.size() - 1, fragment);
  }
}

void check_exchanged(const KeySpec& key, size_t i, uint32_t max_ranks) {
  const std::vector<ExchangedRange>& ranges = key.exchanged_by;
  if (ranges.size() > kMaxExchangedRanges) {
    fail(ErrorCode::kInvalid, "keys[{}].exchanged_by: {} ranges, more than {}", i, ranges.size(),
         kMaxExchangedRanges);
  }
  uint64_t begin = 0;
  for (const ExchangedRange& range : ranges) {
    if (range.end <= begin || range.end > key.elements) {
      fail(ErrorCode::kInvalid,
           "keys[{}].exchanged_by: a range from {} up to, and without, {}; it must not be empty, "
           "and the key has {} elements",
           i, begin, range.end, key.elements);
    }
    uint64_t end = 0;  // behind the last of its ranks
    for (size_t word = 0; word < range.ranks.size(); ++word) {
      if (range.ranks[word] != 0) end = word * 64 + std::bit_width(range.ranks[word]);
    }
    if (end == 0 || end > max_ranks) {
      fail(ErrorCode::kInvalid,
           "keys[{}].exchanged_by: {} up to element {}; the job's ranks are 0 to {}", i,
           end == 0 ? "no rank" : fmt::format("rank {}", end - 1), range.end, max_ranks - 1);
    }
    if (range.ranks.size() > (max_ranks + 63) / 64) {
      fail(ErrorCode::kInvalid,
           "keys[{}].exchanged_by: {} words of ranks up to element {}, more than {} ranks have", i,
           range.ranks.size(), range.end, max_ranks);
    }
    begin = range.end;
  }
  if (!ranges.empty() && begin != key.elements) {
    fail(ErrorCode::kInvalid,
         "keys[{}].exchanged_by: the last range ends at element {}, and the key at {}", i, begin,
         key.elements);
  }
}

void check_values(const std::string& field, const std::map<std::string, double>& values,
                  uint32_t groups) {
  check_number(field + ": number of values", values.size(), 0, kMaxHyperValues);
  for (const auto& [name, value] : values) {
    const std::optional<HyperName> parts = parse_hyper_name(name);
    if (!parts || parts->field.empty() || name.size() > kMaxWordBytes ||
        parts->field.find_first_not_of(kNameCharacters) != name.npos) {
      fail(ErrorCode::kInvalid, "{}: '{}' is not the name of a hyperparameter", field,
           printable(name));
    }
    if (parts->group && *parts->group >= groups) {
      fail(ErrorCode::kInvalid, "{}.{}: the keys are of groups 0 to {}", field, name, groups - 1);
    }
    if (!std::isfinite(value)) {
      fail(ErrorCode::kInvalid, "{}.{}: must be finite, got {}", field, name, value);
    }
  }
}

void check_schedule(const std::vector<HyperChange>& schedule, uint32_t groups) {
  check_number("schedule: number of entries", schedule.size(), 0,
               std::min(kMaxScheduleEntries, kMaxGroupEntries / groups));
  uint64_t previous = 0;
  for (size_t i = 0; i < schedule.size(); ++i) {
    if (schedule[i].round <= previous) {
      fail(ErrorCode::kInvalid, "schedule[{}].round: must be ascending from 1, got {} after {}", i,
           schedule[i].round, previous);
    }
    previous = schedule[i].round;
    check_values(fmt::format("schedule[{}].values", i), schedule[i].values, groups);
  }
}

void check_int32(const JobSpec& spec, uint32_t ranks) {
  const bool used = std::ranges::any_of(
      spec.keys, [&spec](const KeySpec& key) { return gradient_format(spec, key) == kInt32; });
  if (!used || ranks <= kMostInt32Ranks) return;
  fail(ErrorCode::kInvalid,
       "max_ranks: the integers of format int32 are added in 32 bits, which hold the sum of {} "
       "ranks, and the job has {}",
       kMostInt32Ranks, ranks);
}

void check_racks(const JobSpec& spec, uint32_t ranks) {
  if (spec.rack_ranks.empty()) return;
  if (spec.rack_ranks.size() != ranks) {
    fail(ErrorCode::kInvalid, "rack_ranks: {} racks, and max_ranks is {}", spec.rack_ranks.size(),
         ranks);
  }
  uint64_t total = 0;
  for (const uint32_t of_rack : spec.rack_ranks) {
    check_number("rack_ranks: ranks of a rack", of_rack, 1, kMaxRanks);
    total += of_rack;
  }
  check_number("rack_ranks: ranks of all racks", total, 1, kMaxRanks);
}

// A source's job at its standby (phub/job/standby.h): what the source's may be, as one rack.
void check_mirror(const JobSpec& spec) {
  if (!spec.mirrors) return;
  if (spec.rack_ranks.size() != 1 || spec.optimizer == "none" || spec.work != Work::kAll) {
    fail(ErrorCode::kInvalid,
         "mirrors: the job of a box at its standby has one rack, and an optimizer; this one has {} "
         "racks, optimizer '{}', work '{}'",
         spec.rack_ranks.size(), printable(spec.optimizer), spec.work);
  }
  JobSpec at_source = spec;
  at_source.mirrors = false;
  at_source.rack_ranks.clear();
  check_rules(at_source, Feature::kHasStandby);
}

void check_quorum(const JobSpec& spec) {
  check_number("quorum", spec.quorum, 0, most_ranks(spec));
  if (spec.quorum == 0 && spec.grace_ms > 0) {
    fail(ErrorCode::kInvalid,
         "grace_ms: it is how long a round waits for late ranks once its quorum is there, and job "
         "'{}' has no quorum: say with how many ranks a round may end (quorum)",
         printable(spec.name));
  }
  check_number("grace_ms", spec.grace_ms, 0, kMaxLimitMs);
  if (!(spec.late_decay >= 0 && spec.late_decay <= 1)) {
    fail(ErrorCode::kInvalid, "late_decay: must be from 0 to 1, got {}", spec.late_decay);
  }
  const bool has_late = spec.late_decay < 1 || spec.grace == Grace::kAuto;
  if (spec.quorum == 0 && has_late) {
    fail(ErrorCode::kInvalid,
         "{}: it is about ranks that are late, and job '{}' has no quorum, so its rounds wait for "
         "all: say with how many ranks a round may end (quorum)",
         spec.grace == Grace::kAuto ? "grace 'auto'" : "late_decay", printable(spec.name));
  }
  if (spec.quorum > 0 && spec.on_loss == OnLoss::kWait) {
    fail(ErrorCode::kInvalid,
         "quorum: its rounds go on without ranks that are late, and on_loss 'wait' pauses job '{}' "
         "for ranks that are lost: choose another on_loss",
         printable(spec.name));
  }
}

}  // namespace

void check_job_name(std::string_view name) {
  const bool fits = !name.empty() && name.size() <= kMaxNameBytes && name != "." && name != ".." &&
                    name.find_first_not_of(kNameCharacters) == name.npos;
  if (!fits) {
    const std::string_view remedy =
        name.empty() ? ". Give the job a name (PHUB_JOB), or start the ranks with a launcher that "
                       "does, such as 'phub run -n 2 -- python train.py'"
                     : "";
    fail(ErrorCode::kInvalid, "name: must be 1 to {} letters, digits, '.', '_' or '-', got '{}'{}",
         kMaxNameBytes, printable(name), remedy);
  }
}

void validate(const JobSpec& spec) {
  check_job_name(spec.name);
  check_keys(spec.keys, spec.chunk_elements);
  check_fragments(spec);
  check_number("world_size", spec.world_size, 1, kMaxRanks);
  check_number("min_ranks", spec.min_ranks, 0, spec.world_size);
  if (spec.max_ranks != 0) check_number("max_ranks", spec.max_ranks, spec.world_size, kMaxRanks);
  check_quorum(spec);
  check_number("chunk_elements", spec.chunk_elements, 32, kMaxChunkElements);
  if (spec.chunk_elements % 32 != 0) {
    fail(ErrorCode::kInvalid, "chunk_elements: must be a multiple of 32, got {}",
         spec.chunk_elements);
  }
  if (spec.optimizer.empty() || spec.optimizer.size() > kMaxWordBytes) {
    fail(ErrorCode::kInvalid, "optimizer: must be a name, or \"none\", got '{}'",
         printable(spec.optimizer));
  }
  const uint32_t groups = hyper_groups(spec);
  check_values("hyper", spec.hyper, groups);
  check_schedule(spec.schedule, groups);
  check_format("gradient_dtype", spec.gradient_dtype, spec.chunk_elements);
  check_format("parameter_dtype", spec.parameter_dtype, spec.chunk_elements, true);
  for (size_t i = 0; i < spec.keys.size(); ++i) {
    check_compact(spec.keys[i], i, !spec.rack_ranks.empty());
    check_exchanged(spec.keys[i], i, most_ranks(spec));
  }
  check_int32(spec, most_ranks(spec));
  static_cast<void>(KeySchedules(spec));
  check_folds(spec);
  static_cast<void>(RankTree(spec.groups, most_ranks(spec)));
  check_racks(spec, most_ranks(spec));
  check_mirror(spec);
  check_number("branches", spec.branches, 0, kMaxBranches);
  if (spec.branches > 0 && spec.optimizer == "none" && spec.consistency != Consistency::kBsp) {
    fail(
        ErrorCode::kInvalid,
        "branches: in job '{}', which has no optimizer, they are states of the ranks, which change "
        "over together; that needs consistency bsp, not {}",
        printable(spec.name), spec.consistency.word());
  }
  if (spec.branches > 0 && spec.optimizer == "none" && coded_elements(spec) > 0) {
    fail(ErrorCode::kInvalid,
         "branches: in job '{}', which has no optimizer, they are states of the ranks, and what a "
         "rank could not send of gradients of few bits would go into another branch: leave the "
         "formats out, or `branches`",
         printable(spec.name));
  }
  check_number("lease_ms", spec.lease_ms, kMinLeaseMs, kMaxLeaseMs);
  check_number("progress_limit_ms", spec.progress_limit_ms, 1, kMaxLimitMs);
  check_number("wait_limit_ms", spec.wait_limit_ms, 1, kMaxLimitMs);
  check_number("join_limit_ms", spec.join_limit_ms, 1, kMaxLimitMs);
  check_rules(spec);
}

}  // namespace phub
