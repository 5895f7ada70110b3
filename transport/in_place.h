// Memory of the application that a worker's link reads or writes instead of parts of its own
// arrays, if the transport can.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace phub {

// The places of an array's bytes: in the array, except for ranges that were moved. Owned by the
// thread that polls the link.
class MovedRanges {
  struct Range {
    uint64_t begin, end;
    std::byte* memory;
  };

 public:
  // Makes room for a range. Ranges do not overlap; one that was added before stays as it is.
  void add(uint64_t begin, uint64_t bytes) {
    if (find_range(begin) == nullptr) {
      ranges_.insert(ranges_.begin() + ranges_before(begin), {begin, begin + bytes, nullptr});
    }
  }
  // From now on the range lies at `memory`; null: in the array. REQUIRES: it was added.
  void move(uint64_t begin, std::byte* memory) {
    const_cast<Range*>(find_range(begin))->memory = memory;
  }
  // Returns where these bytes of the array lie. A peer may name bytes beyond a range: these are not
  // in memory of the application's.
  template <typename Byte>
  Byte* find(Byte* array, uint64_t offset, uint64_t bytes) const {
    const Range* range = find_range(offset);
    const bool moved = range != nullptr && range->memory != nullptr && bytes <= range->end - offset;
    return moved ? range->memory + (offset - range->begin) : array + offset;
  }

 private:
  // The number of ranges that begin at `offset` or before it.
  std::ptrdiff_t ranges_before(uint64_t offset) const {
    return std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                            [](uint64_t at, const Range& range) { return at < range.begin; }) -
           ranges_.begin();
  }
  const Range* find_range(uint64_t offset) const {
    const std::ptrdiff_t count = ranges_before(offset);
    const Range* last = count > 0 ? &ranges_[static_cast<size_t>(count - 1)] : nullptr;
    return last != nullptr && offset < last->end ? last : nullptr;
  }

  std::vector<Range> ranges_;  // ascending
};

struct InPlace {
  MovedRanges gradients, results;
};

}  // namespace phub
