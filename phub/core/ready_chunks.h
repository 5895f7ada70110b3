// Chunks that can be closed now: higher priority first, then in the order of the keys, which is the
// order of their addresses. So adjacent chunks are summed in one sweep, and the kernels' prefetch
// beyond the end of a chunk fetches the next one. (Prefetching a next one that lies elsewhere
// changes nothing that can be measured: the plan deals out runs of chunks.) Chunks that are left
// alone come when no other is ready.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"

namespace phub {

class ReadyChunks {
 public:
  explicit ReadyChunks(std::span<const CoreChunk> chunks)
      : order_(chunks.size()),
        position_(chunks.size()),
        positions_(chunks.size()),
        left_alone_(chunks.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [chunks](uint32_t a, uint32_t b) {
      return chunks[a].priority > chunks[b].priority;
    });
    for (uint32_t p = 0; p < order_.size(); ++p) position_[order_[p]] = p;
  }

  static constexpr uint64_t bytes(uint64_t chunks) {  // held
    return chunks * 2 * sizeof(uint32_t) + 2 * IndexSet::bytes(chunks);
  }

  bool empty() const { return positions_.empty() && left_alone_.empty(); }
  uint32_t first() const {  // REQUIRES: !empty()
    return order_[(positions_.empty() ? left_alone_ : positions_).lowest()];
  }
  void insert(uint32_t index, bool left_alone = false) {
    (left_alone ? left_alone_ : positions_).insert(position_[index]);
  }
  void erase(uint32_t index) {
    positions_.erase(position_[index]);
    left_alone_.erase(position_[index]);
  }

 private:
  std::vector<uint32_t> order_;     // position -> index
  std::vector<uint32_t> position_;  // index -> position
  IndexSet positions_, left_alone_;
};

}  // namespace phub
