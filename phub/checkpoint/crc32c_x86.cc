// The crc32 instruction of SSE4.2. It takes three cycles and can begin in each of them, so three
// stretches are computed side by side and then combined.
#include <nmmintrin.h>

#include <array>
#include <cstring>

#include "phub/checkpoint/crc32c.h"

namespace phub {
namespace {

constexpr size_t kStretchBytes = 4096;

uint64_t word_at(const std::byte* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// What a state becomes when a stretch of zeros follows. That is linear: a table for each byte.
class ZeroStretch {
 public:
  ZeroStretch() {
    const std::array<std::byte, kStretchBytes> zeros{};
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t state = ~crc32c_by_table(~(uint32_t{1} << bit), zeros);
      auto& table = tables_[bit / 8];
      for (uint32_t byte = 0; byte < 256; ++byte) {
        if ((byte >> bit % 8 & 1) != 0) table[byte] ^= state;
      }
    }
  }
  uint32_t after(uint32_t state) const {
    return tables_[0][state & 0xff] ^ tables_[1][state >> 8 & 0xff] ^
           tables_[2][state >> 16 & 0xff] ^ tables_[3][state >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

__attribute__((target("sse4.2"))) uint32_t x86_step(uint32_t state, const std::byte* bytes,
                                                    size_t size) {
  static const ZeroStretch zeros;
  while (size >= 3 * kStretchBytes) {
    uint64_t first = state, second = 0, third = 0;
    for (size_t at = 0; at < kStretchBytes; at += 8) {
      first = _mm_crc32_u64(first, word_at(bytes + at));
      second = _mm_crc32_u64(second, word_at(bytes + kStretchBytes + at));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * kStretchBytes + at));
    }
    state = zeros.after(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    state = zeros.after(state) ^ static_cast<uint32_t>(third);
    bytes += 3 * kStretchBytes;
    size -= 3 * kStretchBytes;
  }
  for (; size >= 8; bytes += 8, size -= 8) {
    state = static_cast<uint32_t>(_mm_crc32_u64(state, word_at(bytes)));
  }
  for (; size > 0; ++bytes, --size) {
    state = _mm_crc32_u8(state, std::to_integer<uint8_t>(*bytes));
  }
  return state;
}

}  // namespace

Crc32cStep hardware_crc32c() { return __builtin_cpu_supports("sse4.2") != 0 ? x86_step : nullptr; }

}  // namespace phub
