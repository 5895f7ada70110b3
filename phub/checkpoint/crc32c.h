// CRC-32C (Castagnoli), as in iSCSI and ext4. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phub {

// The checksum of bytes that follow others with checksum `crc`; 0: there are none before them. Uses
// the CPU's instruction if there is one.
uint32_t crc32c(uint32_t crc, std::span<const std::byte> bytes);

// Computes the same with tables alone, on any CPU.
uint32_t crc32c_by_table(uint32_t crc, std::span<const std::byte> bytes);

// Advances the register of the checksum, which is its complement. hardware_crc32c() returns null if
// the CPU has no instruction for it.
using Crc32cStep = uint32_t (*)(uint32_t state, const std::byte* bytes, size_t size);
Crc32cStep hardware_crc32c();

}  // namespace phub
