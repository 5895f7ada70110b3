#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/device/add_rows.cc"
#include "worker/device/add_rows.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void add(float* HWY_RESTRICT to, const float* HWY_RESTRICT from, size_t elements) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
  }
  for (; i < elements; ++i) to[i] += from[i];
}

void add_scaled(float* HWY_RESTRICT to, float factor, const float* HWY_RESTRICT from,
                size_t elements) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(d, factor);
  size_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    const auto product = hn::Mul(scale, hn::LoadU(d, from + i));
    hn::StoreU(hn::Add(hn::LoadU(d, to + i), product), d, to + i);
  }
  for (; i < elements; ++i) {
    const float product = factor * from[i];
    to[i] += product;
  }
}

}  // namespace phub::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub {

HWY_EXPORT(add);
HWY_EXPORT(add_scaled);

void add_floats(float* to, const float* from, size_t elements) {
  HWY_DYNAMIC_DISPATCH(add)(to, from, elements);
}

void add_scaled_floats(float* to, float factor, const float* from, size_t elements) {
  HWY_DYNAMIC_DISPATCH(add_scaled)(to, factor, from, elements);
}

}  // namespace phub
#endif
