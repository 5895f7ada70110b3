#include "phub/core/shelves.h"

#include <algorithm>
#include <cstring>

#include "phub/core/way.h"

namespace phub {

bool Shelves::carry_out(uint32_t index, uint64_t round, Way& way) {
  const CoreChunk& chunk = table_[index];
  const uint64_t done = chunk.round;
  bool is_another = false;  // the result is not that of the round that ends
  for (const BranchOrder& order : orders_) {
    if (order.round <= done) continue;
    if (order.round > round) break;
    is_another = is_another || moves_.sets_before(index, order.round);
    // Moves that are due before concern the branch that ran then, and the shelves of that time.
    cost_ += moves_.make_before(index, order.round, way);
    const TraceSpan span = trace_.span("branch", chunk);
    if (order.kind == BranchOrder::kCopy) {
      copy(order, index, way);
    } else {
      swap(order, index, way);
      is_another = is_another || places_.each() > 0;  // else branches are states of the ranks
    }
  }
  return is_another;
}

Shelves::Ahead Shelves::ahead(uint32_t index, uint64_t round) const {
  const uint64_t in_progress = table_[index].round;
  if (round <= in_progress) return {};
  const auto next = std::ranges::upper_bound(orders_, in_progress, {}, &BranchOrder::round);
  const auto end = std::ranges::upper_bound(orders_, round, {}, &BranchOrder::round);
  Ahead ahead;
  for (auto order = end; order != next;) {  // backwards, to where it is now
    --order;
    if (order->kind == BranchOrder::kSwap) {
      ahead.place = swapped(ahead.place, *order);
    } else if (order->from == ahead.place || order->to == ahead.place) {
      ahead.is_settled = false;
    }
  }
  uint64_t from = in_progress;
  uint32_t place = ahead.place;
  for (auto order = next; order != end; ++order) {
    if (order->kind != BranchOrder::kSwap) continue;
    if (place == 0) ahead.rounds += order->round - from;
    place = swapped(place, *order);
    from = order->round;
  }
  ahead.rounds += round - from;
  return ahead;
}

void Shelves::copy(const BranchOrder& order, uint32_t index, const Way& way) {
  const CoreChunk& chunk = table_[index];
  for (size_t i = 0; i < places_.each(); ++i) {
    const Places::Array array = Places::kArrays[i];
    std::memcpy(places_.at(order.to, array, chunk), places_.at(order.from, array, chunk),
                chunk.elements * sizeof(float));
  }
  cost_ += places_.each() * chunk.elements * 2 * sizeof(float);
  steps_of(order.to, chunk) =
      order.from == 0 ? way.steps_before(index, order.round) : steps_of(order.from, chunk);
}

void Shelves::swap(const BranchOrder& order, uint32_t index, Way& way) {
  const CoreChunk& chunk = table_[index];
  cost_ += places_.exchange(order.to, chunk);
  uint64_t& steps = steps_of(order.to, chunk);
  const uint64_t before = way.steps_before(index, order.round);
  way.set_steps_before(index, order.round, steps);
  steps = before;
}

}  // namespace phub
