// The options of the C interface: each is a row of a table that sets a field of the C++ struct.
#include "worker/c_abi/options.h"

#include <charconv>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/control/choices.h"
#include "transport/format_schedule.h"
#include "transport/slot_format.h"
#include "transport/text.h"
#include "worker/c_abi/call.h"

namespace phub::c_abi {

void refuse_option(std::string_view name, std::span<const std::string_view> options) {
  const std::string near = nearest(name, {options.begin(), options.end()});
  throw Refusal(PHUB_INVALID, fmt::format("there is no option '{}'{}", printable(name),
                                          near.empty() ? "" : fmt::format("; '{}'?", near)));
}

int64_t number_in(std::string_view option, std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Refusal(PHUB_INVALID, fmt::format("option '{}' must be a whole number, got '{}'", option,
                                            printable(text)));
  }
  return number;
}

void check_number(std::string_view option, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) {
    throw Refusal(PHUB_INVALID, fmt::format("option '{}' must be from {} to {}, got {}", option,
                                            min, max, value));
  }
}

namespace {

struct Option {
  std::string_view name;
  std::string WorkerOptions::*text = nullptr;
  uint32_t WorkerOptions::*limit = nullptr;
  size_t WorkerOptions::*count = nullptr;
  int32_t WorkerOptions::*number = nullptr;
  bool WorkerOptions::*flag = nullptr;
  const JobOption* of_job = nullptr;
};

constexpr Option kOptions[] = {
    {.name = "server", .text = &WorkerOptions::server},
    {.name = "token", .text = &WorkerOptions::token},
    {.name = "transport", .text = &WorkerOptions::transport},
    {.name = "rank", .number = &WorkerOptions::rank},
    {.name = "replace", .flag = &WorkerOptions::replace},
    {.name = "await_ranks", .flag = &WorkerOptions::await_ranks},
    {.name = "connect_timeout_ms", .limit = &WorkerOptions::connect_timeout_ms},
    {.name = "wait_timeout_ms", .limit = &WorkerOptions::wait_timeout_ms},
    {.name = "rejoin_limit_ms", .limit = &WorkerOptions::rejoin_limit_ms},
    {.name = "silence_limit_ms", .limit = &WorkerOptions::silence_limit_ms},
    {.name = "spin_us", .number = &WorkerOptions::spin_us},
    {.name = "local_world_size", .limit = &WorkerOptions::local_world_size},
    {.name = "nic_budget", .text = &WorkerOptions::nic_budget},
    {.name = "send_order", .text = &WorkerOptions::send_order},
    {.name = "carry_over", .limit = &WorkerOptions::carry_over},
    {.name = "trace", .text = &WorkerOptions::trace},
    {.name = "trace_events", .count = &WorkerOptions::trace_events},
};

// And those of the job.
std::vector<Option> all_options() {
  std::vector<Option> all(std::begin(kOptions), std::end(kOptions));
  for (const JobOption& option : job_options()) {
    all.push_back({.name = option.name, .of_job = &option});
  }
  return all;
}

const Option& option_named(std::string_view name) {
  static const std::vector<Option> all = all_options();
  std::vector<std::string_view> names;
  for (const Option& option : all) {
    if (option.name == name) return option;
    names.push_back(option.name);
  }
  refuse_option(name, names);
}

void set_number(WorkerOptions& options, const Option& option, int64_t value) {
  const bool whole = option.limit || option.of_job || option.count;
  const int64_t min = whole || option.flag ? 0 : -1;
  const int64_t max = whole         ? std::numeric_limits<uint32_t>::max()
                      : option.flag ? 1
                                    : std::numeric_limits<int32_t>::max();
  const bool is_text = option.of_job && !option.of_job->is_number && !option.of_job->is_real();
  if (option.text || is_text) {
    throw Refusal(PHUB_INVALID, fmt::format("option '{}' is a text", option.name));
  }
  check_number(option.name, value, min, max);
  if (option.limit) options.*option.limit = static_cast<uint32_t>(value);
  if (option.of_job) option.of_job->set(options.spec, static_cast<uint32_t>(value));
  if (option.count) options.*option.count = static_cast<size_t>(value);
  if (option.number) options.*option.number = static_cast<int32_t>(value);
  if (option.flag) options.*option.flag = value != 0;
}

void set_text(WorkerOptions& options, const Option& option, std::string_view value) {
  if (option.text) {
    options.*option.text = value;
  } else if (option.of_job && !option.of_job->is_number) {
    // A job whose box computes nothing is for bench/zerocompute alone, which sets JobSpec::work.
    if (option.name == kOption<Work> && value == word_of(Work::kNone)) {
      refuse_word(option.name, value, {word_of(Work::kAll), word_of(Work::kSumOnly)});
    }
    option.of_job->set(options.spec, value);
  } else {
    set_number(options, option, number_in(option.name, value));
  }
}

void check_key(const WorkerOptions& options, size_t key) {
  if (key < options.spec.keys.size()) return;
  throw Refusal(PHUB_INVALID, fmt::format("key {} is out of range: {} keys were added", key,
                                          options.spec.keys.size()));
}

void add_key(WorkerOptions& options, KeySpec key) {
  if (options.spec.keys.size() == kMaxKeys) {
    throw Refusal(PHUB_FULL, fmt::format("a job has at most {} keys", kMaxKeys));
  }
  options.spec.keys.push_back(std::move(key));
}

void check_slot_format(std::string_view format) {
  if (is_schedule(format)) return static_cast<void>(FormatSchedule::parse("format", format));
  if (find_slot_format(format)) return;
  std::vector<std::string_view> words;
  for (const SlotFormat& known : kSlotFormats) words.push_back(known.name);
  refuse_word("format", format, words);
}

// Calls `body(options)` with the handle's options, one thread at a time.
template <typename Body>
phub_code change(const char* function, const phub_options* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<OptionsObject>(handle);
    const std::lock_guard lock(object->mutex);
    body(object->options);
  });
}

phub_code make(const char* function, phub_options** out, WorkerOptions (*options)()) {
  return call(function, [&] {
    need(out, "options");
    auto object = std::make_shared<OptionsObject>();
    object->options = options();
    *out = handle_of<phub_options>(std::move(object), Type::kOptions);
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_options_create(phub_options** options) {
  return make(__func__, options, [] { return WorkerOptions(); });
}

phub_code phub_options_from_environment(phub_options** options) {
  return make(__func__, options, options_from_environment);
}

phub_code phub_options_destroy(phub_options* options) {
  return call(__func__, [&] { Handles::instance().remove(options, Type::kOptions); });
}

phub_code phub_options_set(phub_options* options, const char* name, const char* value) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    need(value, "value");
    set_text(all, option_named(name), value);
  });
}

phub_code phub_options_set_number(phub_options* options, const char* name, int64_t value) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    set_number(all, option_named(name), value);
  });
}

phub_code phub_options_add_key(phub_options* options, const char* name, uint64_t elements) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    add_key(all, {.name = name, .elements = elements});
  });
}

phub_code phub_options_add_shaped_key(phub_options* options, const char* name,
                                      const uint64_t* shape, size_t dimensions) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    need(shape, "shape");
    if (dimensions == 0 || dimensions > kMaxKeyDimensions) {
      throw Refusal(PHUB_INVALID, fmt::format("key '{}': a shape has 1 to {} dimensions, not {}",
                                              printable(name), kMaxKeyDimensions, dimensions));
    }
    const std::span<const uint64_t> all_of_shape(shape, dimensions);
    const std::optional<uint64_t> elements = elements_in(all_of_shape);
    if (!elements) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("key '{}': the shape [{}] has no elements, or more than {}",
                                printable(name), fmt::join(all_of_shape, ", "), kMaxElements));
    }
    add_key(
        all,
        {.name = name, .elements = *elements, .shape = {all_of_shape.begin(), all_of_shape.end()}});
  });
}

phub_code phub_options_tune_key(phub_options* options, size_t key, int32_t priority,
                                double lr_scale, double decay_scale) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    KeySpec& spec = all.spec.keys[key];
    spec.priority = priority, spec.lr_scale = lr_scale, spec.decay_scale = decay_scale;
  });
}

phub_code phub_options_set_group(phub_options* options, size_t key, uint32_t group) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    if (group >= kMaxHyperGroups) {
      throw Refusal(PHUB_INVALID, fmt::format("group {} is out of range: there are groups 0 to {}",
                                              group, kMaxHyperGroups - 1));
    }
    all.spec.keys[key].group = group;
  });
}

phub_code phub_options_set_fragment(phub_options* options, size_t key, uint32_t fragment) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    if (fragment >= kMaxFragments) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("fragment {} is out of range: there are fragments 0 to {}",
                                fragment, kMaxFragments - 1));
    }
    all.spec.keys[key].fragment = fragment;
  });
}

phub_code phub_options_set_rank_limit(phub_options* options, size_t key, uint32_t rank_limit) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    if (rank_limit > kMaxRankLimit) {
      throw Refusal(PHUB_INVALID, fmt::format("rank_limit: must be from 0 to {}, got {}",
                                              kMaxRankLimit, rank_limit));
    }
    set_rank_limit(all.spec.keys[key], rank_limit);
  });
}

phub_code phub_options_set_rows_limit(phub_options* options, size_t key, uint32_t rows_limit,
                                      int lazy) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    if (rows_limit > kMaxRowsLimit) {
      throw Refusal(PHUB_INVALID, fmt::format("rows_limit: must be from 0 to {}, got {}",
                                              kMaxRowsLimit, rows_limit));
    }
    set_rows_limit(all.spec.keys[key], rows_limit, lazy != 0);
  });
}

phub_code phub_options_set_operation(phub_options* options, size_t key, const char* operation,
                                     const char* value_type) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    need(operation, "operation");
    need(value_type, "value_type");
    all.spec.keys[key].operation = operation;
    all.spec.keys[key].value_type = value_type;
  });
}

phub_code phub_options_set_interest(phub_options* options, size_t key, const phub_range* writes,
                                    size_t write_ranges, const phub_range* reads,
                                    size_t read_ranges) {
  return change(__func__, options, [&](WorkerOptions& all) {
    check_key(all, key);
    if (write_ranges > 0) need(writes, "writes");
    if (read_ranges > 0) need(reads, "reads");
    const KeySpec& spec = all.spec.keys[key];
    KeyInterest of{.key = spec.name};
    const auto add = [](std::vector<ElementRange>& to, const phub_range* from, size_t ranges) {
      for (size_t i = 0; i < ranges; ++i) to.push_back({from[i].begin, from[i].end});
    };
    add(of.writes, writes, write_ranges);
    add(of.reads, reads, read_ranges);
    check_ranges(of, spec);
    std::erase_if(all.interest, [&spec](const KeyInterest& old) { return old.key == spec.name; });
    all.interest.push_back(std::move(of));
  });
}

phub_code phub_options_set_format(phub_options* options, const char* pattern, const char* format) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(pattern, "pattern");
    need(format, "format");
    check_slot_format(format);
    if (set_format(all.spec, pattern, format) == 0) {
      throw Refusal(PHUB_NOT_FOUND,
                    fmt::format("no name of the {} keys that were added matches '{}'",
                                all.spec.keys.size(), printable(pattern)));
    }
  });
}

phub_code phub_options_set_hyper(phub_options* options, const char* name, double value) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    all.spec.hyper[name] = value;
  });
}

phub_code phub_options_schedule_hyper(phub_options* options, uint64_t round, const char* name,
                                      double value) {
  return change(__func__, options, [&](WorkerOptions& all) {
    need(name, "name");
    std::vector<HyperChange>& schedule = all.spec.schedule;
    if (schedule.empty() || schedule.back().round != round) {
      if (round == 0 || (!schedule.empty() && round < schedule.back().round)) {
        throw Refusal(PHUB_INVALID,
                      fmt::format("round {} comes after round {}: rounds ascend from "
                                  "1",
                                  round, schedule.empty() ? 0 : schedule.back().round));
      }
      schedule.push_back({.round = round, .values = {}});
    }
    schedule.back().values[name] = value;
  });
}
