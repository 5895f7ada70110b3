// The bytes on the TCP connection of a queue: a hello and its answer; after that single bytes,
// which wake a peer whose provider cannot. Little endian.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/transport.h"

namespace phub {

inline constexpr uint32_t kOfiMagic = 0x4f554850;  // "PHUO" in memory order
inline constexpr uint32_t kOfiVersion = 1;
inline constexpr uint32_t kOfiMaxQueues = 1024;
inline constexpr size_t kOfiMaxNameBytes = 128;

enum class OfiMessage : uint32_t { kHello = 0, kWelcome = 1, kRefusal = 2 };

struct OfiHeader {
  uint32_t magic = kOfiMagic;
  uint32_t version = kOfiVersion;
  OfiMessage type = OfiMessage::kHello;
  uint32_t bytes = 0;  // those that follow this header
};

// The place that the other side writes to: an endpoint, by the name that fi_getname() gives it, and
// memory behind it.
struct OfiTarget {
  uint64_t base = 0;  // the address of the first byte for a write
  uint64_t key = 0;
  uint32_t name_bytes = 0;
  uint32_t reserved = 0;
  std::array<std::byte, kOfiMaxNameBytes> name = {};
};

// Worker to box, first: the queue pair that this is to be, the sizes that the worker derived from
// the plan, and the place for its results.
struct OfiHello {
  OfiHeader header = {.bytes = 216};
  std::array<char, kTicketDigits> ticket = {};
  uint32_t queue = 0;
  uint32_t queues = 0;
  uint32_t queue_chunks = 0;  // the chunks of this queue
  uint32_t reserved = 0;
  uint64_t gradient_bytes = 0;  // size of the worker's memory, for all queues together
  uint64_t result_bytes = 0;
  OfiTarget results;
};

// The answer. A refusal is an OfiHeader followed by text, "code: sentence".
struct OfiWelcome {
  OfiHeader header = {.type = OfiMessage::kWelcome, .bytes = 160};
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  OfiTarget slots;
};
static_assert(sizeof(OfiHeader) == 16 && sizeof(OfiTarget) == 152);
static_assert(sizeof(OfiHello) == 16 + 216 && sizeof(OfiWelcome) == 16 + 160);
static_assert(std::endian::native == std::endian::little);

// All parsers throw Error that names the field; nothing is used before it is checked.

// The first 16 bytes of a hello or of its answer; `header.bytes` is in the type's bounds.
OfiHeader parse_ofi_header(std::span<const std::byte> message, const char* name);
OfiHello parse_ofi_hello(std::span<const std::byte> message);
// Throws Error(kMismatch) when the worker's sizes are not those of `layout`.
void check_ofi_hello(const OfiHello& hello, const LinkLayout& layout);
// If the answer is a refusal, throws the Error that it carries.
OfiWelcome parse_ofi_answer(std::span<const std::byte> message);
std::vector<std::byte> make_ofi_refusal(ErrorCode code, std::string_view reason);

}  // namespace phub
