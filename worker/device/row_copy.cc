#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/device/row_copy.cc"
#include "worker/device/row_copy.h"

#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLine = 64;

// Whole lines are streamed; what of the first and the last is missing is copied.
void copy_past_caches(void* to_memory, const void* from_memory, size_t bytes) {
  auto* to = static_cast<uint8_t*>(to_memory);
  const auto* from = static_cast<const uint8_t*>(from_memory);
  const hn::CappedTag<uint8_t, kLine> d;
  const size_t lanes = hn::Lanes(d);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes < 2 * kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (size_t part = 0; part < kLine; part += lanes) {
      hn::Stream(hn::LoadU(d, from + i + part), d, to + i + part);
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
}

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

HWY_EXPORT(copy_past_caches);
HWY_EXPORT(add);
HWY_EXPORT(add_scaled);

void stream_copy(void* to, const void* from, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_past_caches)(to, from, bytes);
}

void finish_streaming() { hwy::FlushStream(); }

void add_floats(float* to, const float* from, size_t elements) {
  HWY_DYNAMIC_DISPATCH(add)(to, from, elements);
}

void add_scaled_floats(float* to, float factor, const float* from, size_t elements) {
  HWY_DYNAMIC_DISPATCH(add_scaled)(to, factor, from, elements);
}

}  // namespace phub
#endif
