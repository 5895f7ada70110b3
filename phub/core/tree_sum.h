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
  // The tree outlives this. `weighs`: add() may be called with weights.
  TreeSum(const RankTree& tree, size_t largest_chunk, bool weighs)
      : tree_(tree),
        largest_chunk_(largest_chunk),
        parts_((tree.levels() - 1) * largest_chunk),
        weighted_(weighs ? largest_chunk : 0) {}
  static constexpr uint64_t bytes(uint64_t levels, uint64_t largest_chunk, bool weighs) {
    return (levels - 1 + (weighs ? 1 : 0)) * largest_chunk * sizeof(float);
  }

  // Gradients of a chunk. `ranks`, of the slots, ascend; `weights` is empty, or has one of each.
  struct Gradients {
    std::span<const void* const> slots;
    std::span<const uint32_t> ranks;
    std::span<const float> weights = {};
  };
  // Does what kernels::sum() does, or weighted_sum().
  bool add(const Gradients& from, const kernels::SlotShape& shape, float factor, float* out);

 private:
  // A sum in the making.
  struct Chunk {
    const Gradients& from;
    const kernels::SlotShape& shape;
    const float factor;
    float* const out;
    bool finite = true;
  };
  size_t add_group(Chunk& chunk, uint32_t level, size_t first, float* to);
  void add_ranks(Chunk& chunk, size_t first, size_t end, float* to);
  static float factor_of(const Chunk& chunk, const float* to, size_t next);

  const RankTree& tree_;
  const size_t largest_chunk_;
  std::vector<float> parts_;     // [level][largest_chunk_]
  std::vector<float> weighted_;  // the values of one slot, times its weight
};

}  // namespace phub
