// The private data of a connection, byte for byte. README.md describes the same. Little
// endian. (librdmacm carries at most 56 bytes with a request, 148 with a refusal, and pads with
// zeros.)
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "transport/error.h"
#include "transport/transport.h"

namespace phub {

inline constexpr uint32_t kVerbsMagic = 0x56485550;  // "PUHV" in memory order
inline constexpr uint16_t kVerbsVersion = 1;
inline constexpr size_t kVerbsTicketBytes = 16;
inline constexpr size_t kVerbsMaxRefusalBytes = 140;  // the most for refusal_text()

// Worker → box, with the request to connect one queue pair.
struct VerbsHello {
  uint32_t magic = kVerbsMagic;
  uint16_t version = kVerbsVersion;
  uint16_t queue = 0;
  std::array<uint8_t, kVerbsTicketBytes> ticket = {};
  uint64_t results_base = 0;  // write-backs go here
  uint64_t results_bytes = 0;
  uint32_t results_key = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(VerbsHello) == 48 && std::endian::native == std::endian::little);

// Throws Error(kInvalid): too short, or another magic or version.
VerbsHello parse_verbs_hello(std::span<const std::byte> private_data);

// 32 hex digits to bytes. Throws Error(kInvalid).
std::array<uint8_t, kVerbsTicketBytes> ticket_bytes(std::string_view digits);
std::string ticket_digits(std::span<const uint8_t, kVerbsTicketBytes> bytes);

// The memory that a job at the box locks on each NIC: the slots of all ranks, every copy of the
// results.
uint64_t verbs_locked_bytes(const LinkLayout& layout);

}  // namespace phub
