// The slots at the box that chunks of a queue share (Layout::queue_shares): which chunk may write
// to a slot, and which ones wait for it. Those of an earlier round go first: other ranks may wait
// for their results before they send anything of the next one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "worker/session/waiting_sends.h"

namespace phub {

// It is used by one thread at a time.
class SlotTurns {
 public:
  // `shares`: by queue; empty: each chunk has a slot.
  explicit SlotTurns(std::span<const uint32_t> shares) {
    for (const uint32_t slots : shares) queues_.emplace_back(slots);
  }

  bool are_there() const { return !queues_.empty(); }
  // Nobody has a slot, and nobody waits.
  void begin() {
    waiting_ = 0;
    for (std::vector<Slot>& queue : queues_) std::ranges::fill(queue, Slot{});
  }

  // False: another chunk has the slot, and the message waits until release() returns it.
  bool may_take(uint32_t queue, uint32_t index, const WaitingSend& send) {
    Slot& slot = slot_of(queue, index);
    if (slot.chunk == kNone || slot.chunk == send.chunk) return true;
    slot.waiting.push_back(send);
    std::push_heap(slot.waiting.begin(), slot.waiting.end(), goes_later);
    ++waiting_;
    return false;
  }
  // The chunk's gradient is on its way into the slot. REQUIRES: may_take().
  void take(uint32_t queue, uint32_t index, uint32_t chunk) { slot_of(queue, index).chunk = chunk; }
  // If the chunk has its slot, that is free, or the first's of those that wait. Returns the message
  // of that one.
  std::optional<WaitingSend> release(uint32_t queue, uint32_t index, uint32_t chunk) {
    if (!are_there()) return std::nullopt;
    Slot& slot = slot_of(queue, index);
    if (slot.chunk != chunk) return std::nullopt;
    slot.chunk = kNone;
    if (slot.waiting.empty()) return std::nullopt;
    std::pop_heap(slot.waiting.begin(), slot.waiting.end(), goes_later);
    const WaitingSend first = slot.waiting.back();
    slot.waiting.pop_back();
    --waiting_;
    slot.chunk = first.chunk;
    return first;
  }
  size_t waiting() const { return waiting_; }  // messages

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Slot {
    uint32_t chunk = kNone;
    std::vector<WaitingSend> waiting;  // a heap
  };
  static bool goes_later(const WaitingSend& a, const WaitingSend& b) {
    return a.round != b.round ? a.round > b.round : a < b;
  }
  Slot& slot_of(uint32_t queue, uint32_t index) {
    return queues_[queue][index % queues_[queue].size()];
  }

  std::vector<std::vector<Slot>> queues_;
  size_t waiting_ = 0;
};

}  // namespace phub
