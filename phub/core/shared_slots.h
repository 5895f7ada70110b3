// The gradients that lie in slots which chunks of a queue share (Layout::queue_shares).
//
// A rank puts a gradient into a slot when none of its others is there. It learns that the slot is
// free from the result, or from being told that the gradient was taken (transport/wire.h). Ranks
// that send in different orders may wait for each other with that: then the core takes gradients
// out of slots before it sums them (shortage.h), and keeps them elsewhere.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub {

// It belongs to the core's thread. Nothing allocates after construction.
class SharedSlots {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // `slot_of`: by chunk of the core, which of its `slots` it uses.
  SharedSlots(std::vector<uint32_t> slot_of, uint32_t slots, uint32_t max_ranks)
      : slot_of_(std::move(slot_of)),
        slots_(slots),
        chunk_(uint64_t{slots} * max_ranks, kNone),
        used_(max_ranks) {}

  static constexpr uint64_t bytes(uint64_t chunks, uint64_t slots, uint64_t max_ranks) {
    return (chunks + (slots + 1) * max_ranks) * sizeof(uint32_t);
  }

  // The chunk whose gradient lies in this one's slot; kNone: there is none.
  uint32_t chunk_in_slot_of(uint32_t rank, uint32_t index) const {
    return chunk_[place(rank, index)];
  }
  bool has(uint32_t rank, uint32_t index) const { return chunk_in_slot_of(rank, index) == index; }
  // Whether another gradient of the rank is where this one would go.
  bool is_taken(uint32_t rank, uint32_t index) const {
    const uint32_t there = chunk_in_slot_of(rank, index);
    return there != index && there != kNone;
  }
  void put(uint32_t rank, uint32_t index) {  // REQUIRES: not is_taken()
    uint32_t& there = chunk_[place(rank, index)];
    PHUB_CHECK(there == kNone || there == index);
    if (std::exchange(there, index) == kNone) ++used_[rank];
  }
  void free(uint32_t rank, uint32_t index) {  // if it is there
    if (!has(rank, index)) return;
    chunk_[place(rank, index)] = kNone;
    --used_[rank];
  }
  uint32_t used(uint32_t rank) const { return used_[rank]; }  // how many slots
  uint32_t ranks() const { return static_cast<uint32_t>(used_.size()); }
  uint32_t slots() const { return slots_; }  // of each rank

 private:
  uint64_t place(uint32_t rank, uint32_t index) const {
    return uint64_t{rank} * slots_ + slot_of_[index];
  }

  const std::vector<uint32_t> slot_of_;
  const uint32_t slots_;
  std::vector<uint32_t> chunk_;  // [rank][slot]
  std::vector<uint32_t> used_;   // by rank
};

}  // namespace phub
