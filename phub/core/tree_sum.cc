#include "phub/core/tree_sum.h"

#include <array>

namespace phub {

bool TreeSum::add(std::span<const void* const> slots, std::span<const uint32_t> ranks,
                  const kernels::SlotShape& shape, float factor, float* out) {
  if (tree_.levels() == 1 || slots.empty()) return kernels::sum(slots, shape, factor, out);
  Chunk chunk{slots, ranks, shape, factor, out};
  add_group(chunk, 0, 0, out);
  return chunk.finite;
}

// Adds up the group of this level that begins with slot `first`. Returns the slot with which the
// next one begins.
size_t TreeSum::add_group(Chunk& chunk, uint32_t level, size_t first, float* to) {
  const size_t slots = chunk.slots.size();
  const uint32_t end = tree_.end(level, chunk.ranks[first]);
  size_t next = first;
  if (level + 1 == tree_.levels()) {
    while (next < slots && chunk.ranks[next] < end) ++next;
    add_slots(chunk, chunk.slots.subspan(first, next - first), chunk.shape, to, next);
    return next;
  }
  float* const part = parts_.data() + level * largest_chunk_;
  next = add_group(chunk, level + 1, first, to);
  while (next < slots && chunk.ranks[next] < end) {
    next = add_group(chunk, level + 1, next, part);
    add_slots(chunk, std::array<const void*, 2>{to, part},
              {.elements = chunk.shape.elements, .fold = chunk.shape.fold}, to, next);
  }
  return next;
}

// The last addition into the result is the one after which no slots are left. It applies the
// factor, and its check for NaN and Inf covers all parts, as these stay in the sum.
void TreeSum::add_slots(Chunk& chunk, std::span<const void* const> slots,
                        const kernels::SlotShape& shape, float* to, size_t next) {
  const bool is_last = to == chunk.out && next == chunk.slots.size();
  chunk.finite = kernels::sum(slots, shape, is_last ? chunk.factor : 1, to);
}

}  // namespace phub
