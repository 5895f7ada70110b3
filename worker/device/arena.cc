#include "worker/device/arena.h"

#include <algorithm>

namespace phub {

Arena::Arena(size_t bytes) : size_(bytes / kAlignment * kAlignment) {}

std::optional<size_t> Arena::allocate(size_t bytes) {
  if (bytes > size_) return std::nullopt;
  const size_t charged = charge(bytes);
  size_t gap = 0;
  for (const auto& [offset, taken] : allocations_) {
    if (offset - gap >= charged) break;
    gap = offset + charge(taken);
  }
  if (size_ - gap < charged) return std::nullopt;
  allocations_.emplace(gap, bytes);
  used_ += charged;
  return gap;
}

std::optional<size_t> Arena::release(size_t offset) {
  const auto found = allocations_.find(offset);
  if (found == allocations_.end()) return std::nullopt;
  const size_t bytes = found->second;
  allocations_.erase(found);
  used_ -= charge(bytes);
  return bytes;
}

bool Arena::holds(size_t offset, size_t bytes) const {
  auto after = allocations_.upper_bound(offset);
  if (after == allocations_.begin()) return false;
  const auto& [begin, held] = *std::prev(after);
  return offset - begin <= held && bytes <= held - (offset - begin);
}

size_t Arena::largest_free() const {
  size_t largest = 0;
  size_t gap = 0;
  for (const auto& [offset, taken] : allocations_) {
    largest = std::max(largest, offset - gap);
    gap = offset + charge(taken);
  }
  return std::max(largest, size_ - gap);
}

}  // namespace phub
