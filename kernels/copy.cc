#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/copy.cc"
#include "kernels/copy.h"

#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {
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

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {

HWY_EXPORT(copy_past_caches);

void stream_copy(void* to, const void* from, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_past_caches)(to, from, bytes);
}

void finish_streaming() { hwy::FlushStream(); }

}  // namespace phub::kernels
#endif
