// What waits in a session: in which order it is sent, and what of it is carried over.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "worker/session/session.h"

namespace phub {

// REQUIRES: nothing waits.
void Session::find_nics() {
  std::vector<std::string> nics;
  std::vector<size_t> chunks;
  for (uint32_t q = 0; q < queues_.size(); ++q) {
    const auto at = std::ranges::find(nics, link_.nic_of(q));
    queues_[q].nic = static_cast<uint32_t>(at - nics.begin());
    if (at == nics.end()) nics.push_back(link_.nic_of(q)), chunks.push_back(0);
    chunks[queues_[q].nic] += queues_[q].chunks.size();
  }
  waiting_of_.resize(nics.size());
  for (size_t nic = 0; nic < nics.size(); ++nic) waiting_of_[nic].reserve(chunks[nic]);
}

int64_t Session::priority_of(uint32_t id, int32_t priority) const {
  const Chunk& chunk = chunks_[id];
  switch (order_) {
    case SendOrder::kPriority:
      return int64_t{keys_[chunk.key].priority} + priority;
    case SendOrder::kFifo:
      return 0;
    case SendOrder::kRandom:
      return static_cast<int64_t>(shuffled(shuffle_ ^ shuffled(chunk.awaited << 32 | id)) >> 1);
    case SendOrder::kMagnitude:
      return std::bit_cast<int32_t>(chunk.magnitude);  // ascends with numbers that are not negative
  }
  return 0;
}

void Session::enqueue(uint32_t chunk, int32_t priority, ImmKind kind) {
  std::vector<Waiting>& waiting = waiting_of_[queues_[chunks_[chunk].queue].nic];
  waiting.push_back({priority_of(chunk, priority), sequence_++, chunk, kind});
  std::push_heap(waiting.begin(), waiting.end());
  ++waiting_;
}

std::chrono::nanoseconds Session::room_in() const {
  return std::chrono::nanoseconds(waiting_ > 0 ? link_.endpoint().refused_for_ns() : 0);
}

void Session::carry_over(size_t key, uint32_t most_rounds, const Keep& keep) {
  if (broken_ || (key != kAllKeys && ready(key))) return;
  if (room_in().count() == 0) return;  // what waits for room alone goes soon
  for (std::vector<Waiting>& waiting : waiting_of_) carry_over_of(waiting, key, most_rounds, keep);
  post_waiting();
}

void Session::carry_over_of(std::vector<Waiting>& waiting, size_t key, uint32_t most_rounds,
                            const Keep& keep) {
  bool any = false;
  for (Waiting& each : waiting) {
    Chunk& chunk = chunks_[each.chunk];
    const bool asked = key == kAllKeys || chunk.key == key;
    const bool may = each.kind == ImmKind::kData && !chunk.null && !chunk.posted;
    if (!asked || !may || chunk.carried >= most_rounds) continue;
    if (!keep(chunk.key, chunk, chunk.gradient_offset - keys_[chunk.key].gradient_begin)) continue;
    chunk.null = any = true;
    ++chunk.carried;
    ++chunks_carried_over_;
    each.priority = std::numeric_limits<int64_t>::max();
  }
  if (any) std::make_heap(waiting.begin(), waiting.end());
}

}  // namespace phub
