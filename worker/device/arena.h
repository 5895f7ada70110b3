// Allocates parts of a fixed range of addresses: first fit, in multiples of kAlignment.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace phub {

// Not thread-safe. Offsets count from the beginning of the range; `bytes` are as requested.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;  // as cudaMalloc aligns, and four cache lines
  static constexpr size_t charge(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  explicit Arena(size_t bytes);

  // Returns the offset of `bytes` free bytes, or nullopt if no gap is large enough. REQUIRES: bytes
  // > 0.
  std::optional<size_t> allocate(size_t bytes);
  // Returns the bytes of the allocation at `offset`, or nullopt if none begins there.
  std::optional<size_t> release(size_t offset);

  // Whether [offset, offset + bytes) lies inside one allocation.
  bool holds(size_t offset, size_t bytes) const;

  size_t size() const { return size_; }
  size_t used() const { return used_; }  // as charge() counts
  size_t largest_free() const;

 private:
  size_t size_;
  size_t used_ = 0;
  std::map<size_t, size_t> allocations_;  // offset -> bytes
};

}  // namespace phub
