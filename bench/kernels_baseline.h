// The baseline of the kernels in kernels_bench: loops written by hand with intrinsics.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace phub::bench {

// The loop of the kernels' sum for 8 slots of f32: sums in order, times factor, finite or not.
// n must be a multiple of 64. Only for machines that have the instruction set.
using Sum8 = bool (*)(const float* const* slots, float factor, float* out, size_t n);
bool sum8_avx512(const float* const* slots, float factor, float* out, size_t n);
bool sum8_avx2(const float* const* slots, float factor, float* out, size_t n);

// A plain mix of memory accesses, with AVX-512 or else AVX2: reads every array of `reads` and
// updates every array of `updates` in place, all of n floats (a multiple of 64), with one addition
// per read. At most 8 reads and 3 updates.
void mix_streams(std::span<const float* const> reads, std::span<float* const> updates, size_t n);

// Does the same for streams of different widths, with AVX2: a stream has its bytes for every
// kMixElements elements, a multiple of 32. Reads all of `reads`, updates all of `updates` in place,
// and writes all of `writes`, for `elements` of them (a multiple of kMixElements).
inline constexpr size_t kMixElements = 512;
struct MixStream {
  std::byte* data;
  size_t bytes;
};
void mix_bytes(std::span<const MixStream> reads, std::span<const MixStream> updates,
               std::span<const MixStream> writes, size_t elements);

bool has_avx512();
bool has_avx2();

}  // namespace phub::bench
