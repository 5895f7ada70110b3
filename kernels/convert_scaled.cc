#include "kernels/convert_scaled.h"

#include <algorithm>
#include <array>

namespace phub::kernels {

void convert_scaled(const void* from, DType from_dtype, float scale, void* to, DType to_dtype,
                    size_t elements) {
  if (scale == 1) return convert(from, from_dtype, to, to_dtype, elements);
  constexpr size_t kBlock = 4096;  // stays in the cache
  std::array<float, kBlock> block;
  for (size_t at = 0; at < elements; at += kBlock) {
    const size_t count = std::min(kBlock, elements - at);
    const void* source = static_cast<const std::byte*>(from) + at * bytes_of(from_dtype);
    void* target = static_cast<std::byte*>(to) + at * bytes_of(to_dtype);
    float* scaled = to_dtype == DType::kF32 ? static_cast<float*>(target) : block.data();
    sum({&source, 1}, from_dtype, scale, scaled, count);
    if (to_dtype != DType::kF32) convert(scaled, DType::kF32, target, to_dtype, count);
  }
}

}  // namespace phub::kernels
