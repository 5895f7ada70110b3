#include "kernels/slots.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/products.h"

namespace phub::kernels {
namespace {

const float* floats_of(const void* slot) { return static_cast<const float*>(slot); }

bool is_nonfinite(const void* slot, const SlotShape& shape) {
  const size_t pairs = factor_pairs(slot, shape);
  if (pairs > shape.rank_limit) return true;
  const void* const left = slot;
  const void* const right = floats_of(slot) + right_offset(shape);
  return find_nonfinite({&left, 1}, DType::kF32, pairs * shape.rows()) == 0 ||
         find_nonfinite({&right, 1}, DType::kF32, pairs * shape.columns) == 0;
}

}  // namespace

uint32_t factor_pairs(const void* slot, const SlotShape& shape) {
  uint32_t pairs = 0;
  std::memcpy(&pairs, floats_of(slot) + count_offset(shape), sizeof pairs);
  return pairs;
}

bool sum(std::span<const void* const> slots, const SlotShape& shape, float factor, float* out) {
  if (!shape.is_factors()) return sum(slots, shape.dtype, factor, out, shape.elements);
  std::fill_n(out, shape.elements, 0.0f);
  for (const void* slot : slots) {
    const size_t pairs = factor_pairs(slot, shape);
    if (pairs > shape.rank_limit) {
      out[0] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    add_products(floats_of(slot), floats_of(slot) + right_offset(shape), pairs, shape.rows(),
                 shape.columns, out);
  }
  const void* const total = out;
  return sum({&total, 1}, DType::kF32, factor, out, shape.elements);
}

int find_nonfinite(std::span<const void* const> slots, const SlotShape& shape) {
  if (!shape.is_factors()) return find_nonfinite(slots, shape.dtype, shape.elements);
  const auto at =
      std::ranges::find_if(slots, [&shape](const void* slot) { return is_nonfinite(slot, shape); });
  return at == slots.end() ? -1 : static_cast<int>(at - slots.begin());
}

void store_factors(const SlotShape& shape, const float* left, size_t stride, const float* right,
                   size_t first, size_t pairs, void* slot) {
  auto* const to = static_cast<float*>(slot);
  for (size_t pair = 0; pair < pairs; ++pair) {
    std::copy_n(left + pair * stride, shape.rows(), to + (first + pair) * shape.rows());
  }
  std::copy_n(right, pairs * shape.columns, to + right_offset(shape) + first * shape.columns);
  const auto count = static_cast<uint32_t>(first + pairs);
  std::memcpy(to + count_offset(shape), &count, sizeof count);
}

}  // namespace phub::kernels
