#include "phub/core/hyper.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/products.h"
#include "transport/control/message_fields.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

using kernels::Hyper;

constexpr const char* kSlack = "slack";

// Calls visit(group, field, value), for all groups first, as the map has them ("lr", "lr@1").
template <typename Visit>
void for_each_value(const std::map<std::string, double>& values, size_t groups,
                    const Visit& visit) {
  for (const auto& [name, value] : values) {
    const std::optional<HyperName> parts = parse_hyper_name(name);
    if (!parts || (parts->group && *parts->group >= groups)) {
      fail(ErrorCode::kInvalid, "hyperparameter '{}': the keys are of groups 0 to {}",
           printable(name), groups - 1);
    }
    const std::string field(parts->field);
    const size_t first = parts->group.value_or(0);
    for (size_t g = first; g < (parts->group ? first + 1 : groups); ++g) visit(g, field, value);
  }
}

void set_one(Hyper& hyper, const std::string& field, double value) {
  const std::string problem = kernels::set(hyper, field, value);
  if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
}

// Sets the values from `round` on.
void apply(std::span<HyperVersion> groups, uint64_t round,
           const std::map<std::string, double>& values) {
  for (HyperVersion& version : groups) version.from_round = round;
  for_each_value(values, groups.size(), [&](size_t g, const std::string& field, double value) {
    set_one(groups[g].values, field, value);
    groups[g].since[kernels::hyper_field(field)] = round;
  });
}

// The group's latest version up to the round. REQUIRES: there is one.
const HyperVersion& latest(std::span<const HyperVersion> versions, uint64_t round, uint32_t groups,
                           uint32_t group) {
  const auto after = std::upper_bound(
      versions.begin(), versions.end(), round,
      [](uint64_t r, const HyperVersion& version) { return r < version.from_round; });
  return *(after - groups + group);
}

void check_batch(const std::map<std::string, double>& values, const JobSpec& spec) {
  const auto found = values.find(kBatchName);
  if (found == values.end()) return;
  if (spec.branches == 0) {
    fail(ErrorCode::kInvalid,
         "batch: it is what the ranks are told of a branch, and job '{}' has no branches: create "
         "it with some (the option branches), or let the program decide",
         spec.name);
  }
  if (found->second != std::floor(found->second)) {
    fail(ErrorCode::kInvalid, "batch: must be a whole number of samples, got {}", found->second);
  }
}

void check_slack(const std::map<std::string, double>& values, const JobSpec& spec) {
  const auto found = values.find(kSlack);
  if (found == values.end()) return;
  const double slack = found->second;
  if (spec.consistency == "bsp") {
    fail(ErrorCode::kInvalid, "slack needs consistency ssp or async; this job is bsp");
  }
  if (slack != std::floor(slack)) {
    fail(ErrorCode::kInvalid, "slack: must be a whole number of rounds, got {}", slack);
  }
  if (spec.consistency == "ssp" && slack > spec.slack) {
    fail(ErrorCode::kInvalid,
         "slack: must be from 0 to {}, which job '{}' was created with, got {}", spec.slack,
         spec.name, slack);
  }
}

// A value that nothing would look at: the program means another optimizer, or another group. 0 says
// that there is none of it, which is so.
void check_used(const std::map<std::string, double>& values, const JobSpec& spec) {
  const std::optional<kernels::Optimizer> optimizer = kernels::parse_optimizer(spec.optimizer);
  for (const auto& [name, value] : values) {
    const HyperName parts = parse_hyper_name(name).value_or(HyperName{name, std::nullopt});
    const size_t at = kernels::hyper_field(std::string(parts.field));
    if (!optimizer || at == kernels::kHyperFields.size() || value == 0) continue;
    const std::string problem = kernels::unused(*optimizer, kernels::kHyperFields[at], name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "job '{}': {}", spec.name, problem);
    const auto is_of_group = [&](const KeySpec& key) { return key.group == parts.group; };
    if (parts.group && std::ranges::none_of(spec.keys, is_of_group)) {
      fail(ErrorCode::kInvalid, "hyperparameter '{}' is {}, and no key of job '{}' is of group {}",
           printable(name), value, spec.name, *parts.group);
    }
  }
}

// Adafactor's and Muon's is a least divisor: a gradient of zeros would be divided by 0.
void check_eps(const std::map<std::string, double>& values, const JobSpec& spec) {
  if (!steps_whole_keys(spec)) return;
  for (const auto& [name, value] : values) {
    const std::optional<HyperName> parts = parse_hyper_name(name);
    if (!parts || parts->field != "eps" || value > 0) continue;
    fail(ErrorCode::kInvalid, "'{}' is {}: with optimizer '{}' it must be above 0", name, value,
         spec.optimizer);
  }
}

// The ranks apply them in the groups of their optimizer.
void check_ungrouped(const std::map<std::string, double>& values, const JobSpec& spec) {
  for (const auto& [name, value] : values) {
    if (name.find('@') == std::string::npos) continue;
    fail(ErrorCode::kInvalid,
         "hyperparameter '{}': job '{}' has no optimizer, and groups are those of the ranks: give "
         "a value for all of them",
         printable(name), spec.name);
  }
}

}  // namespace

void set_values(const std::map<std::string, double>& values, std::span<Hyper> groups) {
  for_each_value(values, groups.size(), [&](size_t g, const std::string& field, double value) {
    set_one(groups[g], field, value);
  });
}

void add_value(std::vector<HyperChange>& changes, uint64_t round, std::string name, double value) {
  const auto has_room = [round](const HyperChange& change) {
    return change.round == round && change.values.size() < kMaxHyperValues;
  };
  if (changes.empty() || !has_room(changes.back())) {
    changes.push_back({.round = round, .values = {}});
  }
  changes.back().values[std::move(name)] = value;
}

std::vector<HyperChange> hyper_difference(std::span<const Hyper> from, std::span<const Hyper> to,
                                          uint64_t round) {
  std::vector<HyperChange> changes;
  for (const kernels::HyperField& field : kernels::kHyperFields) {
    const bool is_for_all = to.size() == 1 || field.of_job;
    for (size_t g = 0; g < (is_for_all ? 1 : to.size()); ++g) {
      const double value = to[g].*field.member;
      if (value == from[g].*field.member) continue;
      add_value(changes, round, is_for_all ? field.name : fmt::format("{}@{}", field.name, g),
                value);
    }
  }
  return changes;
}

void check_hyper(const std::map<std::string, double>& values, uint32_t groups) {
  for (const auto& [name, value] : values) {
    const std::optional<HyperName> parts = parse_hyper_name(name);
    if (!parts || !parts->group) continue;
    const size_t field = kernels::hyper_field(std::string(parts->field));
    if (field < kernels::kHyperFields.size() && kernels::kHyperFields[field].of_job) {
      fail(ErrorCode::kInvalid, "'{}': {} is the same for all groups", name, parts->field);
    }
  }
  std::vector<HyperVersion> versions(groups);
  apply(versions, 0, values);
}

void check_for_job(const std::map<std::string, double>& values, const JobSpec& spec, bool of_fork) {
  if (of_fork && spec.optimizer == "none") {
    check_ungrouped(values, spec);
  } else {
    check_used(values, spec);
  }
  check_eps(values, spec);
  check_slack(values, spec);
  check_batch(values, spec);
}

KeyClasses key_classes(const JobSpec& spec) {
  KeyClasses out;
  out.groups = hyper_groups(spec);
  std::map<std::tuple<uint32_t, double, double>, uint16_t> seen;
  for (const KeySpec& key : spec.keys) {
    auto [at, is_new] = seen.try_emplace({key.group, key.lr_scale, key.decay_scale},
                                         static_cast<uint16_t>(out.classes.size()));
    if (is_new) {
      if (out.classes.size() == 65535) {
        fail(ErrorCode::kInvalid,
             "job '{}': more than 65535 different triples of group, lr_scale and decay_scale",
             spec.name);
      }
      out.classes.push_back({key.lr_scale, key.decay_scale, key.group});
    }
    out.of_key.push_back(at->second);
  }
  return out;
}

kernels::Hyper HyperView::of(uint64_t round, size_t key_class) const {
  const KeyScales& scale = scales[key_class];
  const HyperVersion& planned = latest(schedule, round, groups, scale.group);
  Hyper hyper = planned.values;
  if (!changes.empty() && changes.front().from_round <= round) {
    const HyperVersion& set = latest(changes, round, groups, scale.group);
    for (size_t f = 0; f < kernels::kHyperFields.size(); ++f) {
      const auto member = kernels::kHyperFields[f].member;
      if (set.since[f] >= planned.since[f]) hyper.*member = set.values.*member;
    }
  }
  hyper.lr = kernels::learning_rate(hyper, round) * scale.lr;
  hyper.weight_decay *= scale.decay;
  return hyper;
}

std::vector<BatchRun> HyperView::batches(uint64_t from_round) const {
  const auto batch_in = [this](uint64_t round) {
    return static_cast<uint64_t>(of(round, 0).batch);
  };
  std::vector<BatchRun> batches = {{.round = from_round, .batch = batch_in(from_round)}};
  for (const HyperVersion& version : changes) {
    const uint64_t round = version.from_round;
    if (round <= batches.back().round) continue;
    const uint64_t batch = batch_in(round);
    if (batch != batches.back().batch) batches.push_back({.round = round, .batch = batch});
  }
  return batches;
}

uint64_t HyperView::slack(uint64_t round) const {
  static const size_t field = kernels::hyper_field(kSlack);
  const HyperVersion* version = &latest(schedule, round, groups, 0);
  if (!changes.empty() && changes.front().from_round <= round) {
    const HyperVersion& set = latest(changes, round, groups, 0);
    if (set.since[field] >= version->since[field]) version = &set;
  }
  return static_cast<uint64_t>(version->values.slack);
}

HyperTable::HyperTable(const JobSpec& spec, kernels::Optimizer optimizer, const KeyClasses& classes)
    : scales_(classes.classes),
      base_(classes.groups, {.values = kernels::default_hyper(optimizer)}) {
  apply(base_, 0, spec.hyper);
  schedule_.reserve((spec.schedule.size() + 1) * base_.size());
  schedule_ = base_;
  for (const HyperChange& change : spec.schedule) add(schedule_, base_, change);
}

// Appends a version per group: the list's last ones, or else those of `before`, and the change.
void HyperTable::add(std::vector<HyperVersion>& list, std::span<const HyperVersion> before,
                     const HyperChange& change) {
  const size_t groups = before.size();
  const std::span last = list.empty() ? before : std::span(list).last(groups);
  std::vector<HyperVersion> next(last.begin(), last.end());
  apply(next, change.round, change.values);
  list.insert(list.end(), next.begin(), next.end());
}

HyperView HyperTable::view() const {
  return {.schedule = schedule_,
          .changes = std::span(changes_).subspan(first_),
          .scales = scales_,
          .groups = static_cast<uint32_t>(base_.size())};
}

void HyperTable::forget(uint64_t lowest) {
  const size_t groups = base_.size();
  while (first_ + groups < changes_.size() && changes_[first_ + groups].from_round <= lowest) {
    first_ += groups;
  }
}

HyperView HyperTable::change(std::span<const HyperChange> changes, uint64_t lowest) {
  forget(lowest);
  const size_t added = changes.size() * base_.size();
  if (changes_.capacity() - changes_.size() < added) {
    const auto live = view().changes;
    std::vector<HyperVersion> moved;
    moved.reserve(std::max<size_t>(16, 2 * (live.size() + added)));
    moved.assign(live.begin(), live.end());
    retired_ = std::exchange(changes_, std::move(moved));
    first_ = 0;
  }
  for (const HyperChange& change : changes) add(changes_, base_, change);
  return view();
}

std::vector<HyperChange> HyperTable::needed_from(uint64_t round) const {
  std::map<uint64_t, std::map<std::string, double>> needed;  // by round
  const auto live = view().changes;
  const size_t groups = base_.size();
  for (size_t v = 0; v < live.size(); ++v) {
    const HyperVersion& version = live[v];
    const bool is_over = v + groups < live.size() && live[v + groups].from_round <= round;
    if (is_over) continue;
    for (size_t f = 0; f < kernels::kHyperFields.size(); ++f) {
      const uint64_t since = version.since[f];
      if (since == 0) continue;
      const auto& field = kernels::kHyperFields[f];
      const bool is_for_all = groups == 1 || field.of_job;
      needed[since][is_for_all ? field.name : fmt::format("{}@{}", field.name, v % groups)] =
          version.values.*field.member;
    }
  }
  std::vector<HyperChange> changes;
  for (const auto& [since, values] : needed) {
    for (const auto& [name, value] : values) add_value(changes, since, name, value);
  }
  return changes;
}

uint64_t HyperTable::bytes() const {
  return (changes_.capacity() + retired_.capacity()) * sizeof(HyperVersion);
}

std::string fixed_value_in(const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const std::optional<HyperName> parts = parse_hyper_name(name);
    if (!parts) continue;
    if (parts->field == "rmsprop_momentum" || parts->field == "ns_steps") return name;
  }
  return "";
}

std::vector<kernels::WholeKey> whole_keys(const JobSpec& spec, kernels::Optimizer optimizer) {
  std::vector<Hyper> groups(hyper_groups(spec), kernels::default_hyper(optimizer));
  set_values(spec.hyper, groups);
  // An emulated FMA takes some 10,000 times as long.
  const double most = kernels::has_fma() ? kMostProducts : kMostProducts / 1e4;
  std::vector<kernels::WholeKey> keys;
  keys.reserve(spec.keys.size());
  for (const KeySpec& key : spec.keys) {
    const Hyper& hyper = groups[key.group];
    keys.push_back(kernels::whole_key(optimizer, hyper, key.shape, key.elements));
    const double products = kernels::products_of(keys.back(), hyper);
    if (products <= most) continue;
    fail(
        ErrorCode::kInvalid,
        "key '{}' of job '{}' is a matrix of {} x {}, and a step of muon would take {:.3g} "
        "multiplications on one core, of {:.3g} at most: give it a group with ns_steps 0, or train "
        "it with another optimizer",
        printable(key.name), spec.name, key.shape[0], key.shape[1], products, most);
  }
  return keys;
}

uint64_t spec_memory(const JobSpec& spec, uint64_t classes) {
  constexpr uint64_t kValueBytes = 112;  // a name and a number in a tree
  const uint64_t versions = sizeof(HyperVersion) * hyper_groups(spec);
  uint64_t bytes = spec.groups.size();
  bytes += (spec.schedule.size() + 1) * (versions + sizeof(HyperChange)) + versions;
  for (const HyperChange& change : spec.schedule) bytes += change.values.size() * kValueBytes;
  for (const KeySpec& key : spec.keys) {
    bytes += sizeof(KeySpec) + key.name.size() + sizeof(uint64_t) + sizeof(uint16_t) +
             key.shape.size() * sizeof(uint64_t);
  }
  return bytes + classes * sizeof(KeyScales);
}

}  // namespace phub
