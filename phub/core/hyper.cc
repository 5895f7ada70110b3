#include "phub/core/hyper.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

using kernels::Hyper;

void apply(Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const std::string problem = kernels::set(hyper, name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
  }
}

// The latest version up to the round. REQUIRES: there is one.
const HyperVersion& latest(std::span<const HyperVersion> versions, uint64_t round) {
  const auto after = std::upper_bound(
      versions.begin(), versions.end(), round,
      [](uint64_t r, const HyperVersion& version) { return r < version.from_round; });
  return *std::prev(after);
}

HyperVersion changed(HyperVersion version, uint64_t round,
                     const std::map<std::string, double>& values) {
  apply(version.values, values);
  version.from_round = round;
  for (const auto& [name, value] : values) version.since[kernels::hyper_field(name)] = round;
  return version;
}

}  // namespace

void check_hyper(const std::map<std::string, double>& values) {
  Hyper hyper;
  apply(hyper, values);
}

KeyClasses key_classes(const JobSpec& spec) {
  KeyClasses out;
  std::map<std::pair<double, double>, uint16_t> seen;
  for (const KeySpec& key : spec.keys) {
    auto [at, is_new] = seen.try_emplace({key.lr_scale, key.decay_scale},
                                         static_cast<uint16_t>(out.classes.size()));
    if (is_new) {
      if (out.classes.size() == 65535) {
        fail(ErrorCode::kInvalid,
             "job '{}': more than 65535 different pairs of lr_scale and decay_scale", spec.name);
      }
      out.classes.push_back({key.lr_scale, key.decay_scale});
    }
    out.of_key.push_back(at->second);
  }
  return out;
}

kernels::Hyper HyperView::of(uint64_t round, size_t key_class) const {
  const HyperVersion& planned = latest(schedule, round);
  Hyper hyper = planned.values;
  if (!changes.empty() && changes.front().from_round <= round) {
    const HyperVersion& set = latest(changes, round);
    for (size_t f = 0; f < kernels::kHyperFields.size(); ++f) {
      const auto member = kernels::kHyperFields[f].member;
      if (set.since[f] >= planned.since[f]) hyper.*member = set.values.*member;
    }
  }
  hyper.lr *= scales[key_class].lr;
  hyper.weight_decay *= scales[key_class].decay;
  return hyper;
}

HyperTable::HyperTable(const JobSpec& spec, kernels::Optimizer optimizer, const KeyClasses& classes)
    : scales_(classes.classes), base_(kernels::default_hyper(optimizer)) {
  apply(base_, spec.hyper);
  schedule_.reserve(spec.schedule.size() + 1);
  schedule_.push_back({.from_round = 0, .values = base_});
  for (const HyperChange& change : spec.schedule) {
    schedule_.push_back(changed(schedule_.back(), change.round, change.values));
  }
}

HyperView HyperTable::view() const {
  return {.schedule = schedule_, .changes = std::span(changes_).subspan(first_), .scales = scales_};
}

void HyperTable::forget(uint64_t lowest) {
  while (first_ + 1 < changes_.size() && changes_[first_ + 1].from_round <= lowest) ++first_;
}

HyperView HyperTable::change(std::span<const HyperChange> changes, uint64_t lowest) {
  forget(lowest);
  if (changes_.capacity() - changes_.size() < changes.size()) {
    const auto live = view().changes;
    std::vector<HyperVersion> moved;
    moved.reserve(std::max<size_t>(16, 2 * (live.size() + changes.size())));
    moved.assign(live.begin(), live.end());
    retired_ = std::exchange(changes_, std::move(moved));
    first_ = 0;
  }
  for (const HyperChange& change : changes) {
    const HyperVersion before =
        changes_.empty() ? HyperVersion{.from_round = 0, .values = base_} : changes_.back();
    changes_.push_back(changed(before, change.round, change.values));
  }
  return view();
}

std::vector<HyperChange> HyperTable::needed_from(uint64_t round) const {
  std::map<uint64_t, HyperChange> needed;  // by round
  const auto live = view().changes;
  for (size_t v = 0; v < live.size(); ++v) {
    const HyperVersion& version = live[v];
    const bool is_over = v + 1 < live.size() && live[v + 1].from_round <= round;
    if (is_over) continue;
    for (size_t f = 0; f < kernels::kHyperFields.size(); ++f) {
      const uint64_t since = version.since[f];
      if (since == 0) continue;
      const auto& field = kernels::kHyperFields[f];
      needed[since].round = since;
      needed[since].values[std::string(field.name)] = version.values.*field.member;
    }
  }
  std::vector<HyperChange> changes;
  for (auto& [since, change] : needed) changes.push_back(std::move(change));
  return changes;
}

uint64_t HyperTable::bytes() const {
  return (changes_.capacity() + retired_.capacity()) * sizeof(HyperVersion);
}

uint64_t spec_memory(const JobSpec& spec, uint64_t classes) {
  constexpr uint64_t kValueBytes = 112;  // a name and a number in a tree
  uint64_t bytes = (spec.schedule.size() + 1) * (sizeof(HyperVersion) + sizeof(HyperChange));
  for (const HyperChange& change : spec.schedule) bytes += change.values.size() * kValueBytes;
  for (const KeySpec& key : spec.keys) {
    bytes += sizeof(KeySpec) + key.name.size() + sizeof(uint64_t) + sizeof(uint16_t) +
             key.shape.size() * sizeof(uint64_t);
  }
  return bytes + classes * sizeof(KeyScales);
}

}  // namespace phub
