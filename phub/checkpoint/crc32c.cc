#include "phub/checkpoint/crc32c.h"

#include <array>
#include <cstring>

namespace phub {
namespace {

using Crc32cTables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: byte b, followed by k bytes of zero.
constexpr Crc32cTables make_crc32c_tables() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
  Crc32cTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}
constexpr Crc32cTables kCrc32cTables = make_crc32c_tables();

uint32_t table_step(uint32_t state, const std::byte* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word = 0;
    for (int i = 7; i >= 0; --i) word = word << 8 | std::to_integer<uint64_t>(bytes[i]);
    word ^= state;
    state = 0;
    for (size_t i = 0; i < 8; ++i) state ^= kCrc32cTables[7 - i][word >> 8 * i & 0xff];
  }
  for (; size > 0; ++bytes, --size) {
    state = (state >> 8) ^ kCrc32cTables[0][(state ^ std::to_integer<uint32_t>(*bytes)) & 0xff];
  }
  return state;
}

}  // namespace

uint32_t crc32c_by_table(uint32_t crc, std::span<const std::byte> bytes) {
  return ~table_step(~crc, bytes.data(), bytes.size());
}

uint32_t crc32c(uint32_t crc, std::span<const std::byte> bytes) {
  static const Crc32cStep hardware = hardware_crc32c();
  if (hardware == nullptr) return crc32c_by_table(crc, bytes);
  return ~hardware(~crc, bytes.data(), bytes.size());
}

}  // namespace phub
