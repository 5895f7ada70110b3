#include "bench/kernels_baseline.h"

#include <immintrin.h>

#include <array>
#include <stdexcept>
#include <utility>

namespace phub::bench {
namespace {

constexpr size_t kMaxReads = 8;
constexpr size_t kMaxUpdates = 3;

// 32 floats of all streams per iteration: two cache lines of each.
template <size_t kReads, size_t kUpdates>
[[gnu::target("avx512f")]] void mix_avx512(const float* const* reads, float* const* updates,
                                           size_t n) {
  for (size_t i = 0; i < n; i += 32) {
    __m512 a = _mm512_loadu_ps(reads[0] + i);
    __m512 b = _mm512_loadu_ps(reads[0] + i + 16);
    for (size_t r = 1; r < kReads; ++r) {
      a = _mm512_add_ps(a, _mm512_loadu_ps(reads[r] + i));
      b = _mm512_add_ps(b, _mm512_loadu_ps(reads[r] + i + 16));
    }
    for (size_t u = 0; u < kUpdates; ++u) {
      float* to = updates[u] + i;
      _mm512_storeu_ps(to, _mm512_add_ps(a, _mm512_loadu_ps(to)));
      _mm512_storeu_ps(to + 16, _mm512_add_ps(b, _mm512_loadu_ps(to + 16)));
    }
  }
}

template <size_t kReads, size_t kUpdates>
[[gnu::target("avx2")]] void mix_avx2(const float* const* reads, float* const* updates, size_t n) {
  for (size_t i = 0; i < n; i += 16) {
    __m256 a = _mm256_loadu_ps(reads[0] + i);
    __m256 b = _mm256_loadu_ps(reads[0] + i + 8);
    for (size_t r = 1; r < kReads; ++r) {
      a = _mm256_add_ps(a, _mm256_loadu_ps(reads[r] + i));
      b = _mm256_add_ps(b, _mm256_loadu_ps(reads[r] + i + 8));
    }
    for (size_t u = 0; u < kUpdates; ++u) {
      float* to = updates[u] + i;
      _mm256_storeu_ps(to, _mm256_add_ps(a, _mm256_loadu_ps(to)));
      _mm256_storeu_ps(to + 8, _mm256_add_ps(b, _mm256_loadu_ps(to + 8)));
    }
  }
}

using Mix = void (*)(const float* const*, float* const*, size_t);

template <size_t... kIndex>
constexpr std::array<Mix, sizeof...(kIndex)> avx512_table(std::index_sequence<kIndex...>) {
  return {mix_avx512<kIndex / kMaxUpdates + 1, kIndex % kMaxUpdates + 1>...};
}

template <size_t... kIndex>
constexpr std::array<Mix, sizeof...(kIndex)> avx2_table(std::index_sequence<kIndex...>) {
  return {mix_avx2<kIndex / kMaxUpdates + 1, kIndex % kMaxUpdates + 1>...};
}

}  // namespace

bool has_avx512() { return __builtin_cpu_supports("avx512f") != 0; }
bool has_avx2() { return __builtin_cpu_supports("avx2") != 0; }

void mix_streams(std::span<const float* const> reads, std::span<float* const> updates, size_t n) {
  static constexpr auto kIndices = std::make_index_sequence<kMaxReads * kMaxUpdates>();
  static constexpr auto kAvx512 = avx512_table(kIndices);
  static constexpr auto kAvx2 = avx2_table(kIndices);
  if (reads.empty() || reads.size() > kMaxReads || updates.empty() ||
      updates.size() > kMaxUpdates || n % 64 != 0 || !has_avx2()) {
    throw std::invalid_argument(
        "mix_streams: 1 to 8 reads, 1 to 3 updates, n divisible by 64, AVX2");
  }
  const size_t index = (reads.size() - 1) * kMaxUpdates + updates.size() - 1;
  (has_avx512() ? kAvx512 : kAvx2)[index](reads.data(), updates.data(), n);
}

[[gnu::target("avx2")]] void mix_bytes(std::span<const MixStream> reads,
                                       std::span<const MixStream> updates,
                                       std::span<const MixStream> writes, size_t elements) {
  __m256i a = _mm256_setzero_si256();
  for (size_t block = 0; block < elements / kMixElements; ++block) {
    for (const MixStream& stream : reads) {
      const auto* from = reinterpret_cast<const __m256i*>(stream.data + block * stream.bytes);
      for (size_t i = 0; i < stream.bytes / 32; ++i) {
        a = _mm256_add_epi32(a, _mm256_loadu_si256(from + i));
      }
    }
    for (const MixStream& stream : updates) {
      auto* at = reinterpret_cast<__m256i*>(stream.data + block * stream.bytes);
      for (size_t i = 0; i < stream.bytes / 32; ++i) {
        _mm256_storeu_si256(at + i, _mm256_add_epi32(a, _mm256_loadu_si256(at + i)));
      }
    }
    for (const MixStream& stream : writes) {
      auto* to = reinterpret_cast<__m256i*>(stream.data + block * stream.bytes);
      for (size_t i = 0; i < stream.bytes / 32; ++i) _mm256_storeu_si256(to + i, a);
    }
  }
}

[[gnu::target("avx512f")]] bool sum8_avx512(const float* const* slots, float factor, float* out,
                                            size_t n) {
  const float *s0 = slots[0], *s1 = slots[1], *s2 = slots[2], *s3 = slots[3];
  const float *s4 = slots[4], *s5 = slots[5], *s6 = slots[6], *s7 = slots[7];
  const __m512 scale = _mm512_set1_ps(factor);
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += 64) {
    __m512 a = _mm512_loadu_ps(s0 + i);
    __m512 b = _mm512_loadu_ps(s0 + i + 16);
    __m512 c = _mm512_loadu_ps(s0 + i + 32);
    __m512 d = _mm512_loadu_ps(s0 + i + 48);
#define PHUB_ADD_SLOT(slot)                               \
  a = _mm512_add_ps(a, _mm512_loadu_ps((slot) + i));      \
  b = _mm512_add_ps(b, _mm512_loadu_ps((slot) + i + 16)); \
  c = _mm512_add_ps(c, _mm512_loadu_ps((slot) + i + 32)); \
  d = _mm512_add_ps(d, _mm512_loadu_ps((slot) + i + 48));
    PHUB_ADD_SLOT(s1)
    PHUB_ADD_SLOT(s2)
    PHUB_ADD_SLOT(s3)
    PHUB_ADD_SLOT(s4)
    PHUB_ADD_SLOT(s5)
    PHUB_ADD_SLOT(s6)
    PHUB_ADD_SLOT(s7)
#undef PHUB_ADD_SLOT
#define PHUB_FINISH(v, offset)                                                              \
  v = _mm512_mul_ps(v, scale);                                                              \
  largest = _mm512_max_epi32(largest, _mm512_and_epi32(_mm512_castps_si512(v), magnitude)); \
  _mm512_storeu_ps(out + i + (offset), v);
    PHUB_FINISH(a, 0)
    PHUB_FINISH(b, 16)
    PHUB_FINISH(c, 32)
    PHUB_FINISH(d, 48)
#undef PHUB_FINISH
  }
  return _mm512_cmpge_epi32_mask(largest, _mm512_set1_epi32(0x7F800000)) == 0;
}

[[gnu::target("avx2")]] bool sum8_avx2(const float* const* slots, float factor, float* out,
                                       size_t n) {
  const float *s0 = slots[0], *s1 = slots[1], *s2 = slots[2], *s3 = slots[3];
  const float *s4 = slots[4], *s5 = slots[5], *s6 = slots[6], *s7 = slots[7];
  const __m256 scale = _mm256_set1_ps(factor);
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  for (size_t i = 0; i < n; i += 32) {
    __m256 a = _mm256_loadu_ps(s0 + i);
    __m256 b = _mm256_loadu_ps(s0 + i + 8);
    __m256 c = _mm256_loadu_ps(s0 + i + 16);
    __m256 d = _mm256_loadu_ps(s0 + i + 24);
#define PHUB_ADD_SLOT(slot)                               \
  a = _mm256_add_ps(a, _mm256_loadu_ps((slot) + i));      \
  b = _mm256_add_ps(b, _mm256_loadu_ps((slot) + i + 8));  \
  c = _mm256_add_ps(c, _mm256_loadu_ps((slot) + i + 16)); \
  d = _mm256_add_ps(d, _mm256_loadu_ps((slot) + i + 24));
    PHUB_ADD_SLOT(s1)
    PHUB_ADD_SLOT(s2)
    PHUB_ADD_SLOT(s3)
    PHUB_ADD_SLOT(s4)
    PHUB_ADD_SLOT(s5)
    PHUB_ADD_SLOT(s6)
    PHUB_ADD_SLOT(s7)
#undef PHUB_ADD_SLOT
#define PHUB_FINISH(v, offset)                                                              \
  v = _mm256_mul_ps(v, scale);                                                              \
  largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(v), magnitude)); \
  _mm256_storeu_ps(out + i + (offset), v);
    PHUB_FINISH(a, 0)
    PHUB_FINISH(b, 8)
    PHUB_FINISH(c, 16)
    PHUB_FINISH(d, 24)
#undef PHUB_FINISH
  }
  const __m256i bad = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7F7FFFFF));
  return _mm256_testz_si256(bad, bad) != 0;
}

}  // namespace phub::bench
