// sum_of_squares. An element's square is exact in double, so only the order of additions counts.
#include <array>

#include "kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

double SumOfSquares(const float* g, size_t n) {
  const hn::CappedTag<double, kSquareLanes> d;
  const hn::Rebind<float, decltype(d)> half;
  constexpr size_t kLanes = hn::MaxLanes(d);
  constexpr size_t kVectors = kSquareLanes / kLanes;
  hn::Vec<decltype(d)> sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(d);
  size_t i = 0;
  for (; i + kSquareLanes <= n; i += kSquareLanes) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVectors; ++v) {
      const auto x = hn::PromoteTo(d, hn::LoadU(half, g + i + v * kLanes));
      sums[v] = hn::Add(sums[v], hn::Mul(x, x));
    }
  }
  std::array<double, kSquareLanes> lanes;
  for (size_t v = 0; v < kVectors; ++v) hn::StoreU(sums[v], d, lanes.data() + v * kLanes);
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += double{g[i]} * double{g[i]};
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {

HWY_EXPORT(SumOfSquares);

double sum_of_squares(const float* g, size_t elements) {
  return HWY_DYNAMIC_DISPATCH(SumOfSquares)(g, elements);
}

}  // namespace phub::kernels
#endif
