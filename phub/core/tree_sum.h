// The sum of a chunk's gradients in the order of additions of the job: ascending ranks, or group by
// group. A group's sum begins with its first part that has a gradient; a group without any is left
// out.
//
// Core's thread. Nothing allocates after construction: every level of the tree but the last has
// room for the sum of a part, which stays in cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/slots.h"
#include "transport/control/rank_tree.h"

namespace phub {

class TreeSum {
 public:
  // The tree outlives this.
  TreeSum(const RankTree& tree, size_t largest_chunk)
      : tree_(tree), largest_chunk_(largest_chunk), parts_((tree.levels() - 1) * largest_chunk) {}
  static constexpr uint64_t bytes(uint64_t levels, uint64_t largest_chunk) {
    return (levels - 1) * largest_chunk * sizeof(float);
  }

  // Does what kernels::sum() does. `ranks` are those of the slots, ascending.
  bool add(std::span<const void* const> slots, std::span<const uint32_t> ranks,
           const kernels::SlotShape& shape, float factor, float* out);

 private:
  // A sum in the making.
  struct Chunk {
    std::span<const void* const> slots;
    std::span<const uint32_t> ranks;
    const kernels::SlotShape& shape;
    const float factor;
    float* const out;
    bool finite = true;
  };
  size_t add_group(Chunk& chunk, uint32_t level, size_t first, float* to);
  static void add_slots(Chunk& chunk, std::span<const void* const> slots,
                        const kernels::SlotShape& shape, float* to, size_t next);

  const RankTree& tree_;
  const size_t largest_chunk_;
  std::vector<float> parts_;  // [level][largest_chunk_]
};

}  // namespace phub
