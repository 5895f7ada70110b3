#include "transport/control/job_spec.h"

#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>

#include "transport/control/choices.h"
#include "transport/control/message_fields.h"
#include "transport/format_schedule.h"
#include "transport/slot_format.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kShownBytes = 100;  // of a value, in a sentence
// The first field in which two structs differ, as a sentence; "" if there is none.
std::string difference(const void* here, const void* there, const json::Type& type) {
  for (const json::Field& field : type.table().fields) {
    if (field.type == json::type_of<std::vector<KeySpec>>()) continue;  // told apart key by key
    if (field.name == "max_ranks") continue;  // 0 stands for another number
    const void* own = static_cast<const char*>(here) + field.offset;
    const void* other = static_cast<const char*>(there) + field.offset;
    if (field.equal != nullptr && field.equal(own, other)) continue;
    const auto shown = [&](const void* value) {
      if (field.type == json::type_of<std::string>()) {
        return fmt::format("'{}'", printable(*static_cast<const std::string*>(value)));
      }
      std::string text;
      json::write(text, value, *field.type);
      if (!field.type->words.empty()) text = fmt::format("'{}'", text.substr(1, text.size() - 2));
      return text;
    };
    const auto shortened = [](const std::string& text) {
      return text.size() <= kShownBytes ? text : text.substr(0, kShownBytes) + "…";
    };
    const std::string in_own = shown(own), in_other = shown(other);
    if (in_own == in_other) continue;
    return fmt::format("{} is {} here and {} in the job", field.name, shortened(in_own),
                       shortened(in_other));
  }
  return "";
}

std::string key_difference(const KeySpec& here, const KeySpec& there, size_t i) {
  if (here.name != there.name) {
    return fmt::format("key {} is '{}' here and '{}' in the job", i, printable(here.name),
                       printable(there.name));
  }
  if (here.elements != there.elements) {
    return fmt::format("key {} '{}' has {} elements here and {} in the job", i,
                       printable(here.name), here.elements, there.elements);
  }
  return fmt::format("key {} '{}': {}", i, printable(here.name),
                     difference(&here, &there, *json::type_of<KeySpec>()));
}

double real_in(std::string_view option, std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  fail(ErrorCode::kInvalid, "{}: must be a number, got '{}'", option, printable(text));
}

// In some round, if its format changes.
bool is_coded(const JobSpec& spec, const KeySpec& key) {
  const std::string& name = gradient_format(spec, key);
  if (is_schedule(name)) return true;
  const SlotFormat* const format = find_slot_format(name);
  return format && !format->is_plain();
}

// Calls visit(key) for the keys whose names match. Returns how many there are.
template <typename Visit>
size_t for_each_matching(JobSpec& spec, const std::string& pattern, const Visit& visit) {
  size_t matching = 0;
  for (KeySpec& key : spec.keys) {
    if (fnmatch(pattern.c_str(), key.name.c_str(), 0) != 0) continue;
    visit(key);
    ++matching;
  }
  return matching;
}

}  // namespace

std::optional<uint64_t> elements_in(std::span<const uint64_t> shape) {
  uint64_t elements = 1;
  for (const uint64_t dimension : shape) {
    if (dimension == 0 || dimension > kMaxElements / elements) return std::nullopt;
    elements *= dimension;
  }
  return elements;
}

std::optional<HyperName> parse_hyper_name(std::string_view name) {
  const size_t at = name.find('@');
  if (at == name.npos) return HyperName{name, std::nullopt};
  const std::string_view digits = name.substr(at + 1);
  uint32_t group = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), group);
  const bool fits = error == std::errc() && end == digits.data() + digits.size() &&
                    group < kMaxHyperGroups && digits.size() == fmt::formatted_size("{}", group);
  if (!fits) return std::nullopt;
  return HyperName{name.substr(0, at), group};
}

uint32_t hyper_groups(const JobSpec& spec) {
  uint32_t last = 0;
  for (const KeySpec& key : spec.keys) last = std::max(last, key.group);
  return last + 1;
}

uint32_t fragments_of(const JobSpec& spec) {
  uint32_t last = 0;
  for (const KeySpec& key : spec.keys) last = std::max(last, key.fragment);
  return last + 1;
}

bool clips(const JobSpec& spec) {
  const auto has = [](const HyperChange& change) { return change.values.contains("max_norm"); };
  return spec.hyper.contains("max_norm") || std::ranges::any_of(spec.schedule, has);
}

bool adapts_by_key(const JobSpec& spec) {
  return spec.optimizer == "lars" || spec.optimizer == "lamb";
}

bool steps_whole_keys(const JobSpec& spec) {
  return spec.optimizer == "adafactor" || spec.optimizer == "muon";
}

bool is_gated(const JobSpec& spec) {
  return clips(spec) || spec.on_nonfinite == "skip" || adapts_by_key(spec) ||
         steps_whole_keys(spec) || spec.mirrors;
}

void wait_for_all_ranks(JobSpec& spec) {
  spec.quorum = spec.grace_ms = 0;
  spec.grace = Grace::kFixed;
  spec.late_decay = 1;
  for (KeySpec& key : spec.keys) key.fragment = 0;
}

void drop_grad_scale(JobSpec& spec) {
  const auto drop = [](std::map<std::string, double>& values) {
    std::erase_if(values, [](const auto& value) {
      const auto name = parse_hyper_name(value.first);
      return name && name->field == "grad_scale";
    });
  };
  drop(spec.hyper);
  for (HyperChange& change : spec.schedule) drop(change.values);
  std::erase_if(spec.schedule, [](const HyperChange& change) { return change.values.empty(); });
}

bool has_own_results(const JobSpec& spec) {
  return spec.consistency != Consistency::kBsp || spec.quorum > 0;
}

size_t set_format(JobSpec& spec, const std::string& pattern, const std::string& format) {
  return for_each_matching(spec, pattern, [&format](KeySpec& key) { key.format = format; });
}

namespace {
// With both limits each push says whether it is rows or factors.
void set_format_by_limits(KeySpec& key) {
  if (key.rows_limit > 0) {
    key.format = kRows;
  } else if (key.rank_limit > 0) {
    key.format = kFactors;
  } else if (is_compact(key)) {
    key.format = "";
  }
}
}  // namespace

void set_rank_limit(KeySpec& key, uint32_t rank_limit) {
  key.rank_limit = rank_limit;
  set_format_by_limits(key);
}

size_t set_factors(JobSpec& spec, const std::string& pattern, uint32_t rank_limit) {
  return for_each_matching(spec, pattern,
                           [rank_limit](KeySpec& key) { set_rank_limit(key, rank_limit); });
}

void set_rows_limit(KeySpec& key, uint32_t rows_limit, bool lazy) {
  key.rows_limit = rows_limit;
  key.lazy = rows_limit > 0 && lazy;
  set_format_by_limits(key);
}

size_t set_rows(JobSpec& spec, const std::string& pattern, uint32_t rows_limit, bool lazy) {
  return for_each_matching(
      spec, pattern, [rows_limit, lazy](KeySpec& key) { set_rows_limit(key, rows_limit, lazy); });
}

uint32_t rows_together(const KeySpec& key) {
  return static_cast<uint32_t>(kChunkAlignment / std::gcd(kChunkAlignment, key.shape[1]));
}

// A slot also takes the initial parameters, in kMostInitialParts parts at most.
uint32_t most_tile_rows(const KeySpec& key) {
  const uint64_t columns = key.shape[1], together = rows_together(key);
  uint64_t rows = kMaxChunkElements / columns;
  if (key.rank_limit > 0) {
    const uint64_t of_slot = kMaxChunkElements / key.rank_limit;  // elements that a pair may have
    if (of_slot <= columns) return 0;
    rows = std::min(rows, of_slot - columns);
  }
  rows = std::min(rows, kMostInitialParts * uint64_t{std::max(key.rank_limit, key.rows_limit)});
  if (rows >= key.shape[0]) return static_cast<uint32_t>(key.shape[0]);
  return static_cast<uint32_t>(rows / together * together);
}

uint32_t tile_rows_for(const KeySpec& key, uint64_t cores, uint32_t chunk_elements) {
  const uint64_t together = rows_together(key);
  if (key.rank_limit > 0 && key.rows_limit > 0) cores = kTilesOfEither;
  const uint64_t wanted = key.rank_limit > 0 ? (key.shape[0] + cores - 1) / cores
                                             : chunk_elements / key.shape[1] / together * together;
  const uint64_t whole = (std::max<uint64_t>(wanted, 1) + together - 1) / together * together;
  return static_cast<uint32_t>(std::min<uint64_t>(whole, most_tile_rows(key)));
}

const std::string& gradient_memory_format(const JobSpec& spec, const KeySpec& key) {
  static const std::string f32 = "f32";
  const bool by_chunks = is_compact(key) || is_coded(spec, key) || spec.weights == Weights::kYes;
  return by_chunks ? f32 : gradient_format(spec, key);
}

uint64_t coded_elements(const JobSpec& spec) {
  uint64_t elements = 0;
  for (const KeySpec& key : spec.keys) {
    if (is_coded(spec, key)) elements += key.elements;
  }
  return elements;
}

uint64_t elements_of(const JobSpec& spec) {
  uint64_t elements = 0;
  for (const KeySpec& key : spec.keys) elements += key.elements;
  return elements;
}

const SlotFormat* difference_format(const JobSpec& spec) {
  const SlotFormat* format = find_slot_format(spec.parameter_dtype);
  return format && !format->is_plain() ? format : nullptr;
}

const std::string& parameter_memory_format(const JobSpec& spec) {
  static const std::string f32 = "f32";
  return difference_format(spec) ? f32 : spec.parameter_dtype;
}

uint64_t rounding_seed(std::string_view job) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : job) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return hash;
}

std::vector<std::string_view> optimizer_states(const JobSpec& spec) {
  static const std::map<std::string_view, std::vector<std::string_view>> all = {
#define PHUB_OPTIMIZER(constant, rule, name, ...) {name, {__VA_ARGS__}},
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
  };
  const auto found = all.find(spec.optimizer);
  if (found == all.end()) return {};
  std::vector<std::string_view> states = found->second;
  if (spec.optimizer == "rmsprop") {
    const auto momentum = spec.hyper.find("rmsprop_momentum");
    if (momentum == spec.hyper.end() || momentum->second == 0) states.pop_back();
  }
  return states;
}

std::span<const JobOption> job_options() {
  static const auto all = [] {
    std::vector<JobOption> options;
    for (const json::Field& field : json::type_of<JobSpec>()->table().fields) {
      const bool is_number = field.type == json::type_of<uint32_t>();
      const bool is_text = field.type == json::type_of<std::string>() ||
                           field.type == json::type_of<double>() || !field.type->words.empty();
      if (!is_number && !is_text) continue;
      options.push_back({field.name == "name" ? "job" : field.name, is_number, field});
    }
    return options;
  }();
  return all;
}

void JobOption::set(JobSpec& spec, std::string_view text) const {
  void* const at = reinterpret_cast<std::byte*>(&spec) + field.offset;
  if (is_real()) {
    *static_cast<double*>(at) = real_in(name, text);
  } else if (field.type->words.empty()) {
    *static_cast<std::string*>(at) = text;
  } else if (!field.type->assign(at, text, {})) {
    refuse_word(name, text, {field.type->words.begin(), field.type->words.end()});
  }
}

void JobOption::set(JobSpec& spec, uint32_t number) const {
  void* const at = reinterpret_cast<std::byte*>(&spec) + field.offset;
  if (is_real()) {
    *static_cast<double*>(at) = number;
  } else {
    *static_cast<uint32_t*>(at) = number;
  }
}

bool JobOption::is_real() const { return field.type == json::type_of<double>(); }

std::string difference(const JobSpec& here, const JobSpec& in_the_job) {
  std::string sentence = difference(&here, &in_the_job, *json::type_of<JobSpec>());
  if (!sentence.empty()) return sentence;
  if (most_ranks(here) != most_ranks(in_the_job)) {
    return fmt::format("max_ranks is {} here and {} in the job", most_ranks(here),
                       most_ranks(in_the_job));
  }
  const auto& keys = in_the_job.keys;
  for (size_t i = 0; i < std::min(here.keys.size(), keys.size()); ++i) {
    KeySpec key = here.keys[i];
    if (key.tile_rows == 0) key.tile_rows = keys[i].tile_rows;
    if (!(key == keys[i])) return key_difference(key, keys[i], i);
  }
  if (here.keys.size() != keys.size()) {
    return fmt::format("there are {} keys here and {} in the job", here.keys.size(), keys.size());
  }
  return "";
}

}  // namespace phub
