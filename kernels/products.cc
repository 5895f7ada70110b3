// add_products. An element's operations are a chain, sample by sample; different elements are
// independent, so tiles of them are kept in registers over all samples.
#include "kernels/products.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/products.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One element, or several in a row.
HWY_INLINE void add_alone(const float* left, const float* right, size_t samples, size_t rows,
                          size_t columns, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float sum = out[i];
    for (size_t s = 0; s < samples; ++s) {
      sum = std::fma(left[s * rows], right[s * columns + i], sum);
    }
    out[i] = std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : sum;
  }
}

#if HWY_NATIVE_FMA

constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
constexpr size_t kRows = 8;
constexpr size_t kColumns = 2 * kLanes;
// Columns whose factors stay in the first-level cache while all rows pass, for 32 samples.
constexpr size_t kBlock = 128;
static_assert(kBlock % kColumns == 0);

// R rows of two vectors of columns; all pointers are to the first of them.
template <size_t R>
HWY_INLINE void add_tile(const float* left, const float* right, size_t samples, size_t rows,
                         size_t columns, float* out) {
  const hn::ScalableTag<float> d;
  hn::Vec<decltype(d)> sums[R][2];
  for (size_t r = 0; r < R; ++r) {
    sums[r][0] = hn::LoadU(d, out + r * columns);
    sums[r][1] = hn::LoadU(d, out + r * columns + kLanes);
  }
  for (size_t s = 0; s < samples; ++s) {
    const auto a = hn::LoadU(d, right + s * columns);
    const auto b = hn::LoadU(d, right + s * columns + kLanes);
    HWY_UNROLL(8)
    for (size_t r = 0; r < R; ++r) {
      const auto x = hn::Set(d, left[s * rows + r]);
      sums[r][0] = hn::MulAdd(x, a, sums[r][0]);
      sums[r][1] = hn::MulAdd(x, b, sums[r][1]);
    }
  }
  const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  for (size_t r = 0; r < R; ++r) {
    for (size_t v = 0; v < 2; ++v) {
      const auto sum = hn::IfThenElse(hn::IsNaN(sums[r][v]), nan, sums[r][v]);
      hn::StoreU(sum, d, out + r * columns + v * kLanes);
    }
  }
}

void AddProducts(const float* left, const float* right, size_t samples, size_t rows, size_t columns,
                 float* out) {
  const size_t whole = columns / kColumns * kColumns;
  for (size_t begin = 0; begin < whole; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, whole);
    size_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      for (size_t at = begin; at < end; at += kColumns) {
        add_tile<kRows>(left + row, right + at, samples, rows, columns, out + row * columns + at);
      }
    }
    for (; row < rows; ++row) {
      for (size_t at = begin; at < end; at += kColumns) {
        add_tile<1>(left + row, right + at, samples, rows, columns, out + row * columns + at);
      }
    }
  }
  for (size_t row = 0; row < rows; ++row) {
    add_alone(left + row, right + whole, samples, rows, columns, out + row * columns + whole,
              columns - whole);
  }
}

#else

void AddProducts(const float* left, const float* right, size_t samples, size_t rows, size_t columns,
                 float* out) {
  for (size_t row = 0; row < rows; ++row) {
    add_alone(left + row, right, samples, rows, columns, out + row * columns, columns);
  }
}

#endif

bool HasFma() { return HWY_NATIVE_FMA != 0; }

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {

HWY_EXPORT(AddProducts);
HWY_EXPORT(HasFma);

void add_products(const float* left, const float* right, size_t samples, size_t rows,
                  size_t columns, float* out) {
  HWY_DYNAMIC_DISPATCH(AddProducts)(left, right, samples, rows, columns, out);
}

bool has_fma() { return HWY_DYNAMIC_DISPATCH(HasFma)(); }

}  // namespace phub::kernels
#endif
