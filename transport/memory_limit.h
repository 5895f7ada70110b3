// How much memory several holders may have together, and how much they have. Any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace phub {

class MemoryLimit {
 public:
  explicit MemoryLimit(uint64_t limit) : limit_(limit) {}

  uint64_t limit() const { return limit_; }
  uint64_t used() const { return used_; }
  bool has_room(uint64_t bytes) const {
    const uint64_t used = used_;
    return used <= limit_ && bytes <= limit_ - used;
  }
  uint64_t excess() const {
    const uint64_t used = used_;
    return used > limit_ ? used - limit_ : 0;
  }
  // Takes as much of this memory as there is room for, in pieces of so many bytes. Returns the
  // number of pieces.
  uint64_t take(uint64_t pieces, uint64_t piece_bytes) {
    uint64_t used = used_;
    for (;;) {
      const uint64_t room = used < limit_ ? limit_ - used : 0;
      const uint64_t taken = std::min(pieces, room / piece_bytes);
      if (used_.compare_exchange_weak(used, used + taken * piece_bytes)) return taken;
    }
  }
  void take_beyond(uint64_t bytes) { used_ += bytes; }  // whether there is room or not
  void release(uint64_t bytes) { used_ -= bytes; }

 protected:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace phub
