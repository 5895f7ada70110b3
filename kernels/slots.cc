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
  const PairsOfSlot pairs = pairs_of(slot, shape);
  const void* const left = pairs.left;
  const void* const right = pairs.right;
  return !pairs.fits || find_nonfinite({&left, 1}, DType::kF32, pairs.count * shape.rows()) == 0 ||
         find_nonfinite({&right, 1}, DType::kF32, pairs.count * shape.columns) == 0;
}

bool has_factors(const void* slot, const SlotShape& shape) {
  return shape.form == SlotForm::kFactors ||
         (shape.form == SlotForm::kEither && (row_count(slot) & kPairs) != 0);
}

bool has_nonfinite(const void* slot, const SlotShape& shape) {
  return has_factors(slot, shape) ? has_nonfinite_factors(slot, shape)
                                  : has_nonfinite_rows(slot, shape);
}

void add_row(const float* elements, float* to, size_t columns) {
  sum(std::array<const void*, 2>{to, elements}, DType::kF32, 1, to, columns);
}

// False: a slot is not as it should be.
bool add_factors(std::span<const void* const> slots, const SlotShape& shape, float* out) {
  bool fits = true;
  for (const void* slot : slots) {
    if (!has_factors(slot, shape)) {
      fits &= for_each_row(slot, shape, [&](size_t row, const float* elements) {
        add_row(elements, out + row * shape.columns, shape.columns);
      });
      continue;
    }
    const PairsOfSlot pairs = pairs_of(slot, shape);
    fits &= pairs.fits;
    add_products(pairs.left, pairs.right, pairs.count, shape.rows(), shape.columns, out);
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
      add_row(elements, out + row * shape.columns, shape.columns);
    });
  }
  return fits;
}

}  // namespace

PairsOfSlot pairs_of(const void* slot, const SlotShape& shape) {
  const bool either = shape.form == SlotForm::kEither;
  uint32_t count = 0;
  std::memcpy(&count, floats_of(slot) + (either ? 0 : count_offset(shape)), sizeof count);
  if (either) count = (count & kPairs) != 0 ? count - kPairs : 0;
  const float* const left = floats_of(slot) + (either ? 1 : 0);
  const float* const right = left + (either ? count * shape.rows() : right_offset(shape));
  if (count > shape.limit) return {left, right, 0, false};
  return {left, right, count, true};
}

bool sum(std::span<const void* const> slots, const SlotShape& shape, float factor, float* out) {
  if (shape.fold) return fold_slots(slots, shape, out), true;
  if (shape.form == SlotForm::kElements) {
    return sum(slots, shape.dtype, factor, out, shape.elements);
  }
  std::fill_n(out, shape.elements, 0.0f);
  const bool of_factors =
      std::ranges::any_of(slots, [&](const void* slot) { return has_factors(slot, shape); });
  const bool fits = of_factors ? add_factors(slots, shape, out) : add_rows(slots, shape, out);
  if (!fits) out[0] = std::numeric_limits<float>::quiet_NaN();
  const void* const total = out;
  return sum({&total, 1}, DType::kF32, factor, out, shape.elements);
}

bool weighted_sum(std::span<const void* const> slots, std::span<const float> weights,
                  const SlotShape& shape, float factor, float* scratch, float* out) {
  if (slots.empty()) return sum(slots, shape, factor, out);
  sum(slots.first(1), shape, weights[0], out);
  for (size_t i = 1; i < slots.size(); ++i) {
    sum(slots.subspan(i, 1), shape, weights[i], scratch);
    const bool is_last = i + 1 == slots.size();
    const std::array<const void*, 2> both = {out, scratch};
    const bool finite = sum(both, DType::kF32, is_last ? factor : 1, out, shape.elements);
    if (is_last) return finite;
  }
  const void* const only = out;
  return sum({&only, 1}, DType::kF32, factor, out, shape.elements);
}

int find_nonfinite(std::span<const void* const> slots, const SlotShape& shape) {
  if (shape.form == SlotForm::kElements) {
    return find_nonfinite(slots, shape.dtype, shape.elements);
  }
  const auto at =
      std::ranges::find_if(slots, [&](const void* slot) { return has_nonfinite(slot, shape); });
  return at == slots.end() ? -1 : static_cast<int>(at - slots.begin());
}

void clear_factors(const SlotShape& shape, size_t pairs, void* slot) {
  if (shape.form != SlotForm::kEither) return;  // their number stands behind them
  const uint32_t first = kPairs + static_cast<uint32_t>(pairs);
  std::memcpy(slot, &first, sizeof first);
}

void store_factors(const SlotShape& shape, const float* left, size_t stride, const float* right,
                   size_t first, size_t pairs, void* slot) {
  const bool either = shape.form == SlotForm::kEither;
  auto* const to = static_cast<float*>(slot) + (either ? 1 : 0);
  const size_t right_at = either ? (row_count(slot) - kPairs) * shape.rows() : right_offset(shape);
  for (size_t pair = 0; pair < pairs; ++pair) {
    std::copy_n(left + pair * stride, shape.rows(), to + (first + pair) * shape.rows());
  }
  std::copy_n(right, pairs * shape.columns, to + right_at + first * shape.columns);
  if (either) return;
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
      add_row(elements, to, shape.columns);
      return;
    }
  }
  std::memcpy(at, &row, sizeof row);
  std::memcpy(at + sizeof row, elements, shape.columns * sizeof(float));
  ++count;
  std::memcpy(slot, &count, sizeof count);
}

}  // namespace phub::kernels
