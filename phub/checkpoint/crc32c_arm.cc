// The CRC32 instructions of 64-bit ARM, optional before ARMv8.1.
#include <sys/auxv.h>

#include <cstring>

#include "phub/checkpoint/crc32c.h"

namespace phub {
namespace {

constexpr unsigned long kHasCrc32 = 1ul << 7;  // HWCAP_CRC32

uint32_t arm_step(uint32_t state, const std::byte* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
  }
  for (; size > 0; ++bytes, --size) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1"
            : "+r"(state)
            : "r"(std::to_integer<uint32_t>(*bytes)));
  }
  return state;
}

}  // namespace

Crc32cStep hardware_crc32c() { return (getauxval(AT_HWCAP) & kHasCrc32) != 0 ? arm_step : nullptr; }

}  // namespace phub
