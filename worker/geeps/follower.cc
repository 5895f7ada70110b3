#include "worker/geeps/follower.h"

#include <fmt/format.h>

#include <algorithm>

namespace phub::geeps {

Follower::Follower(const Sequence& sequence)
    : tables_(sequence.tables),
      lists_(sequence.lists),
      operations_(sequence.operations),
      next_acquisition_(operations_.size()),
      clock_steps_(tables_.size()),
      clocked_(tables_.size()) {
  const auto steps = static_cast<uint32_t>(operations_.size());
  for (uint32_t step = 0; step < steps; ++step) {
    if (operations_[step].call == Call::kTableClock) clock_steps_[operations_[step].table] = step;
  }
  const bool any = std::any_of(operations_.begin(), operations_.end(),
                               [](const Operation& o) { return is_acquisition(o.call); });
  if (!any) {
    operations_.clear();  // nothing to follow
    return;
  }
  uint32_t distance = 0;
  for (uint32_t i = 2 * steps; i-- > 0;) {
    distance = is_acquisition(operations_[i % steps].call) ? 0 : distance + 1;
    next_acquisition_[i % steps] = distance;
  }
}

std::optional<uint64_t> Follower::follow(Call call, uint32_t table,
                                         std::span<const uint64_t> keys) {
  if (operations_.empty()) return {};
  const uint64_t expected = acquisition_from(next_);
  if (matches(expected, call, table, keys)) {
    elsewhere_.reset();
    next_ = expected + 1;
    return last_ = expected;
  }
  if (elsewhere_) {
    const uint64_t there = acquisition_from(*elsewhere_);
    if (matches(there, call, table, keys)) {
      elsewhere_.reset();
      next_ = there + 1;
      return last_ = there;
    }
  }
  elsewhere_.reset();
  last_.reset();
  for (uint64_t step = expected + 1; step < expected + operations_.size(); ++step) {
    if (!matches(step, call, table, keys)) continue;
    last_ = step;
    elsewhere_ = step + 1;
    break;
  }
  return {};
}

std::optional<uint64_t> Follower::clock(uint32_t table) {
  if (operations_.empty() || !clock_steps_[table]) return {};
  const uint64_t steps = operations_.size();
  uint64_t step = std::max(next_, clocked_[table]);
  step += (*clock_steps_[table] + steps - step % steps) % steps;
  clocked_[table] = step + 1;
  return step;
}

uint64_t Follower::clocks_before(uint32_t table, uint64_t step) const {
  if (operations_.empty() || !clock_steps_[table]) return 0;
  const uint64_t steps = operations_.size();
  const auto count = [&](uint64_t before) {  // clocks at steps less than this
    return before / steps + (before % steps > *clock_steps_[table] ? 1 : 0);
  };
  const uint64_t from = std::max(next_, clocked_[table]);
  return step <= from ? 0 : count(step) - count(from);
}

std::string Follower::deviation(Call call, uint32_t table, std::span<const uint64_t> keys) const {
  const std::string came =
      fmt::format("{} of {} rows of '{}'", name_of(call), keys.size(), tables_[table].name);
  if (operations_.empty()) return came + ", but nothing was recorded";
  const uint64_t step = acquisition_from(next_) % operations_.size();
  const Operation& expected = operations_[step];
  std::string why;
  if (expected.call == call && expected.table == table) why = ": the keys differ";
  return fmt::format("{}, where step {} of the sequence is {} of {} rows of '{}'{}", came, step,
                     name_of(expected.call), lists_[expected.list].keys.size(),
                     tables_[expected.table].name, why);
}

bool Follower::matches(uint64_t step, Call call, uint32_t table,
                       std::span<const uint64_t> keys) const {
  const Operation& operation = operations_[step % operations_.size()];
  if (operation.call != call || operation.table != table) return false;
  return std::ranges::equal(lists_[operation.list].keys, keys);
}

uint64_t Follower::acquisition_from(uint64_t step) const {
  return step + next_acquisition_[step % operations_.size()];
}

}  // namespace phub::geeps
