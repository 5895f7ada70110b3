#include "phub/core/tree_sum.h"

#include <algorithm>
#include <array>

namespace phub {

bool TreeSum::add(const Gradients& from, const kernels::SlotShape& shape, float factor,
                  float* out) {
  Chunk chunk{from, shape, factor, out};
  if (tree_.levels() == 1 || from.slots.empty()) {
    add_ranks(chunk, 0, from.slots.size(), out);
  } else {
    add_group(chunk, 0, 0, out);
  }
  return chunk.finite;
}

// Adds up the group of this level that begins with slot `first`. Returns the slot with which the
// next one begins.
size_t TreeSum::add_group(Chunk& chunk, uint32_t level, size_t first, float* to) {
  const size_t slots = chunk.from.slots.size();
  const std::span<const uint32_t> ranks = chunk.from.ranks;
  const uint32_t end = tree_.end(level, ranks[first]);
  size_t next = first;
  if (level + 1 == tree_.levels()) {
    while (next < slots && ranks[next] < end) ++next;
    add_ranks(chunk, first, next, to);
    return next;
  }
  float* const part = parts_.data() + level * largest_chunk_;
  next = add_group(chunk, level + 1, first, to);
  while (next < slots && ranks[next] < end) {
    next = add_group(chunk, level + 1, next, part);
    chunk.finite = kernels::sum(std::array<const void*, 2>{to, part},
                                {.elements = chunk.shape.elements, .fold = chunk.shape.fold},
                                factor_of(chunk, to, next), to);
  }
  return next;
}

// Adds up the slots from `first` up to `end`.
void TreeSum::add_ranks(Chunk& chunk, size_t first, size_t end, float* to) {
  const auto slots = chunk.from.slots.subspan(first, end - first);
  const float factor = factor_of(chunk, to, end);
  const auto weights = chunk.from.weights.empty() ? std::span<const float>()
                                                  : chunk.from.weights.subspan(first, end - first);
  // Of elements the bits are the same, and cheaper.
  const bool all_are_one = chunk.shape.form == kernels::SlotForm::kElements &&
                           std::ranges::all_of(weights, [](float w) { return w == 1; });
  chunk.finite =
      weights.empty() || all_are_one
          ? kernels::sum(slots, chunk.shape, factor, to)
          : kernels::weighted_sum(slots, weights, chunk.shape, factor, weighted_.data(), to);
}

// The last addition into the result is the one after which no slots are left. It applies the
// factor, and its check for NaN and Inf covers all parts, as these stay in the sum.
float TreeSum::factor_of(const Chunk& chunk, const float* to, size_t next) {
  return to == chunk.out && next == chunk.from.slots.size() ? chunk.factor : 1;
}

}  // namespace phub
