#include "kernels/slots.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "kernels/products.h"

namespace phub::kernels {
namespace {

const float* floats_of(const void* slot) { return static_cast<const float*>(slot); }

bool has_nonfinite_rows(const void* slot, const SlotShape& shape) {
  bool finite = true;
  const bool fits = for_each_row(slot, shape, [&](size_t, const float* elements) {
    const void* const row = elements;
    finite &= find_nonfinite({&row, 1}, DType::kF32, shape.columns) < 0;
  });
  return !fits || !finite;
}

bool has_nonfinite_factors(const void* slot, const SlotShape& shape) {
  const size_t pairs = factor_pairs(slot, shape);
  if (pairs > shape.limit) return true;
  const void* const left = slot;
  const void* const right = floats_of(slot) + right_offset(shape);
  return find_nonfinite({&left, 1}, DType::kF32, pairs * shape.rows()) == 0 ||
         find_nonfinite({&right, 1}, DType::kF32, pairs * shape.columns) == 0;
}

// False: a slot is not as it should be.
bool add_factors(std::span<const void* const> slots, const SlotShape& shape, float* out) {
  bool fits = true;
  for (const void* slot : slots) {
    const size_t pairs = factor_pairs(slot, shape);
    if (pairs > shape.limit) {
      fits = false;
      continue;
    }
    add_products(floats_of(slot), floats_of(slot) + right_offset(shape), pairs, shape.rows(),
                 shape.columns, out);
  }
  return fits;
}

// The first slot may be `out` itself.
void fold_slots(std::span<const void* const> slots, const SlotShape& shape, float* out) {
  if (!slots.empty() && slots.front() == out) {
    slots = slots.subspan(1);
  } else {
    fill_with_identity(shape.fold, out, shape.elements);
  }
  for (const void* slot : slots) {
    if (shape.form == SlotForm::kElements) {
      fold(shape.fold, slot, out, shape.elements);
    } else {
      for_each_row(slot, shape, [&](size_t row, const float* elements) {
        fold(shape.fold, elements, out + row * shape.columns, shape.columns);
      });
    }
  }
}

// As add_factors(). Rows begin at -0, to which the first that is added is assigned: -0 + x is x.
bool add_rows(std::span<const void* const> slots, const SlotShape& shape, float* out) {
  bool fits = true;
  for (const void* slot : slots) {
    fits &= for_each_row(slot, shape, [&](size_t row, const float*) {
      std::fill_n(out + row * shape.columns, shape.columns, -0.0f);
    });
  }
  for (const void* slot : slots) {
    for_each_row(slot, shape, [&](size_t row, const float* elements) {
      float* const to = out + row * shape.columns;
      sum(std::array<const void*, 2>{to, elements}, DType::kF32, 1, to, shape.columns);
    });
  }
  return fits;
}

}  // namespace

uint32_t factor_pairs(const void* slot, const SlotShape& shape) {
  uint32_t pairs = 0;
  std::memcpy(&pairs, floats_of(slot) + count_offset(shape), sizeof pairs);
  return pairs;
}

bool sum(std::span<const void* const> slots, const SlotShape& shape, float factor, float* out) {
  if (shape.fold) return fold_slots(slots, shape, out), true;
  if (shape.form == SlotForm::kElements) {
    return sum(slots, shape.dtype, factor, out, shape.elements);
  }
  std::fill_n(out, shape.elements, 0.0f);
  const bool fits = shape.form == SlotForm::kFactors ? add_factors(slots, shape, out)
                                                     : add_rows(slots, shape, out);
  if (!fits) out[0] = std::numeric_limits<float>::quiet_NaN();
  const void* const total = out;
  return sum({&total, 1}, DType::kF32, factor, out, shape.elements);
}

int find_nonfinite(std::span<const void* const> slots, const SlotShape& shape) {
  if (shape.form == SlotForm::kElements) {
    return find_nonfinite(slots, shape.dtype, shape.elements);
  }
  const auto at = std::ranges::find_if(slots, [&shape](const void* slot) {
    return shape.form == SlotForm::kFactors ? has_nonfinite_factors(slot, shape)
                                            : has_nonfinite_rows(slot, shape);
  });
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

void clear_rows(void* slot) { std::memset(slot, 0, sizeof(uint32_t)); }

void append_row(const SlotShape& shape, uint32_t row, const float* elements, void* slot) {
  uint32_t count = row_count(slot);
  auto* at = static_cast<std::byte*>(slot) + bytes_of_rows(shape.columns, count);
  if (count > 0) {
    std::byte* const latest = at - row_bytes(shape.columns);
    uint32_t same = 0;
    std::memcpy(&same, latest, sizeof same);
    if (same == row) {
      auto* const to = reinterpret_cast<float*>(latest + sizeof row);
      if (shape.fold) return fold(shape.fold, elements, to, shape.columns);
      sum(std::array<const void*, 2>{to, elements}, DType::kF32, 1, to, shape.columns);
      return;
    }
  }
  std::memcpy(at, &row, sizeof row);
  std::memcpy(at + sizeof row, elements, shape.columns * sizeof(float));
  ++count;
  std::memcpy(slot, &count, sizeof count);
}

}  // namespace phub::kernels
