// The places of gradients at a core of a box that holds a window of them, in place of a slot for
// each chunk of each rank.
//
// A gradient gets a place before its first byte is read, and keeps it until the core has summed it.
// A rank for which no place is free is not read from: its socket fills, and it waits. Ranks that
// send the same chunks in about the same order need few places, however large the model is. If they
// do not, each may wait for a chunk that another one cannot send: then the core makes room
// (grow()), up to a place for each chunk. Places beyond the window go once they are given back.
//
// A place has the size of the largest slot of the core. Endpoint and core share a window, and the
// thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "numa/memory.h"
#include "transport/memory_limit.h"

namespace phub {

// What the windows of a job at all cores of a box have in common. Any thread. It outlives them.
struct WindowsOfBox {
  explicit WindowsOfBox(uint32_t ranks) : short_ranks(ranks) {}
  ~WindowsOfBox() {
    if (limit != nullptr) limit->release(grown_bytes);
  }

  std::vector<std::atomic<uint32_t>> short_ranks;  // by rank, at how many cores it is short
  std::atomic<uint64_t> bytes{0};                  // of all places
  std::atomic<uint64_t> grown_bytes{0};            // of the places beyond the windows' size
  std::atomic<uint64_t> growths{0};                // so many times
  // It has room for what the windows grow by; it outlives this; null: they grow without a limit.
  // REQUIRES, to set it: no core uses its window yet.
  MemoryLimit* limit = nullptr;
  std::atomic<bool> refused{false};  // the limit had no room for the latest growth
};

class SlotWindow {
 public:
  // Where a worker believes that the chunk's slot is, in bytes of its rank's slots.
  struct Slot {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  struct Shape {
    std::vector<Slot> slots;             // of the core's chunks, queue after queue
    std::vector<uint32_t> queue_chunks;  // how many each queue has
    uint32_t max_ranks = 0;
    uint32_t first_rank = 0, end_rank = 0;  // these have places
    // Of each rank, at the beginning. 0: each that is needed comes with move_in().
    uint32_t places = 1;
    uint32_t block_places = 1;  // then, how many of them are allocated at once at most
    uint32_t os_node = 0;
    WindowsOfBox* box = nullptr;  // null: there is one window, which grows without a limit
  };
  // Throws Error(kFull) where there is no memory.
  explicit SlotWindow(Shape shape);

  // The bytes of a place for slots of so many bytes, and of everything else in a window.
  static constexpr uint64_t place_bytes(uint64_t slot_bytes) {
    // Equal addresses modulo 4 KiB would compete for the same sets of a cache.
    return (slot_bytes + kLine - 1) / kLine * kLine + kLine;
  }
  static constexpr uint64_t bookkeeping(uint64_t chunks, uint64_t ranks, uint64_t places) {
    return chunks * sizeof(Slot) + ranks * (chunks + places) * sizeof(uint32_t);
  }

  // For the endpoint. Queues are those of the core.
  // Whether the write lies within the chunk's slot.
  bool fits(uint32_t queue, uint32_t chunk_of_queue, uint64_t offset, uint64_t bytes) const;
  // The place of such a write; null: none is free, and the rank is short. REQUIRES: it fits.
  std::byte* take(uint32_t rank, uint32_t queue, uint32_t chunk_of_queue, uint64_t offset);
  // Whether the chunk has a place. REQUIRES: there is such a chunk.
  bool has_place(uint32_t rank, uint32_t queue, uint32_t chunk_of_queue) const {
    return at(rank, queue_first_[queue] + chunk_of_queue) != nullptr;
  }
  void drop(uint32_t rank, uint32_t queue, uint32_t chunk_of_queue) {  // what is there is worthless
    give_back(rank, queue_first_[queue] + chunk_of_queue);
  }
  // Whether take() would find one. If not, the rank is short. REQUIRES: there is such a chunk.
  bool has_room(uint32_t rank, uint32_t queue, uint32_t chunk_of_queue) {
    Rank& of = ranks_[rank];
    if (!of.free.empty() || of.place[queue_first_[queue] + chunk_of_queue] != kNoPlace) return true;
    if (is_open_ && grow(rank, 1)) return true;
    note_shortage(rank, true);
    return false;
  }

  // The place for a gradient that the core takes out of its slot; null: there is no memory, or the
  // limit has no room. REQUIRES: the chunk has none.
  std::byte* move_in(uint32_t rank, uint32_t index);

  // For the core. Chunks are counted over its queues.
  const std::byte* at(uint32_t rank, uint32_t index) const {  // null: it has no place
    const uint32_t place = ranks_[rank].place[index];
    return place == kNoPlace ? nullptr : address(rank, place);
  }
  void give_back(uint32_t rank, uint32_t index);  // if it has one

  // Whether some rank is short, or this one: it had no place, and none has become free.
  bool is_short() const { return short_ > 0; }
  bool is_short(uint32_t rank) const { return ranks_[rank].is_short; }
  bool is_short_somewhere(uint32_t rank) const {
    return is_short(rank) ||
           (box_ != nullptr && box_->short_ranks[rank].load(std::memory_order_relaxed) > 0);
  }
  bool is_refused() const {  // the limit had no room for what was to grow last, at any core
    return box_ != nullptr && box_->refused.load(std::memory_order_relaxed);
  }
  void forget_shortage(uint32_t rank) { note_shortage(rank, false); }  // the rank is detached
  void note_shortage(uint32_t rank, bool is_short);
  // Gives each rank that is short so many more places, or the rank; fewer where the limit has room
  // for no more. False: there is no memory.
  bool grow(uint32_t places);
  bool grow(uint32_t rank, uint32_t places);
  uint32_t places() const { return places_; }  // of a rank's window
  // While it is open, everybody gets as many places as there is memory for, beyond the limit, too.
  bool open(bool is_open) { return std::exchange(is_open_, is_open); }
  uint64_t grown() const { return grown_; }  // so many times

 private:
  static constexpr uint64_t kLine = 128;
  static constexpr uint32_t kNoPlace = ~uint32_t{0};
  static constexpr uint64_t kBlockBytes = 2 << 20;

  struct Rank {
    std::vector<uint32_t> place;  // by chunk
    std::vector<uint32_t> free;   // the last is taken next: what was used lately is in a cache
    std::vector<uint32_t> spare;  // not in the window, and without memory
    uint32_t in_use = 0;          // places that chunks have
    std::vector<numa::Memory> blocks;
    bool is_short = false;
  };
  void add_places(Rank& rank, uint32_t places);
  uint32_t reserve(uint32_t places);
  void release(uint32_t places);
  std::byte* place_for(uint32_t rank, uint32_t index);
  std::byte* address(uint32_t rank, uint32_t place) const {
    const uint32_t in_block = place & ((1u << block_shift_) - 1);
    return ranks_[rank].blocks[place >> block_shift_].bytes().data() + in_block * place_bytes_;
  }

  const std::vector<Slot> slots_;
  std::vector<uint32_t> queue_first_;  // where each queue's chunks begin, and the end
  const uint32_t os_node_;
  WindowsOfBox* const box_;
  uint64_t place_bytes_ = 0;
  uint32_t block_shift_ = 0;  // a block has 2^this places
  uint32_t places_ = 1;
  bool is_open_ = false;
  std::vector<Rank> ranks_;
  uint32_t short_ = 0;  // ranks
  uint64_t grown_ = 0;
};

}  // namespace phub
