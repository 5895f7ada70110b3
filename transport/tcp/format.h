// The bytes on a TCP connection: a hello, its answer, then frames both ways. Little endian. One
// connection is one queue pair.
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

inline constexpr uint32_t kTcpMagic = 0x54554850;  // "PHUT" in memory order
inline constexpr uint32_t kTcpVersion = 1;
inline constexpr uint32_t kTcpMaxQueues = 1024;
inline constexpr uint32_t kTcpRingSlack = 16;  // posted writes beyond the queue's chunks

enum class TcpMessage : uint32_t { kHello = 0, kWelcome = 1, kRefusal = 2 };

struct TcpHeader {
  uint32_t magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  TcpMessage type = TcpMessage::kHello;
  uint32_t bytes = 0;  // those that follow this header
};

// Worker to box, first: the queue pair that this connection is to be, and the sizes that the worker
// derived from the plan.
struct TcpHello {
  TcpHeader header = {.bytes = 64};
  std::array<char, kTicketDigits> ticket = {};
  uint32_t queue = 0;
  uint32_t queues = 0;
  uint32_t queue_chunks = 0;  // the chunks of this queue
  uint32_t reserved = 0;
  uint64_t gradient_bytes = 0;  // size of the worker's memory, for all queues together
  uint64_t result_bytes = 0;
};

// The answer. A refusal is a TcpHeader followed by text, "code: sentence".
struct TcpWelcome {
  TcpHeader header = {.type = TcpMessage::kWelcome, .bytes = 8};
  uint32_t rank = 0;
  uint32_t incarnation = 0;
};

// A write: its payload goes to `remote_offset` of the receiver's memory.
struct TcpFrame {
  uint32_t imm = 0;
  uint32_t bytes = 0;
  uint64_t remote_offset = 0;
};

// Writes travel in batches: this, `more` frames, then the payloads of all of them. So the receiver
// knows where the next payloads go and takes many with one system call.
struct TcpBatch {
  uint32_t more = 0;      // less than kTcpMaxBatch
  uint32_t reserved = 0;  // 0
  TcpFrame first;
};
inline constexpr uint32_t kTcpMaxBatch = 32;
static_assert(sizeof(TcpBatch) == 24);
static_assert(sizeof(TcpHeader) == 16 && sizeof(TcpHello) == 80 && sizeof(TcpWelcome) == 24);
static_assert(sizeof(TcpFrame) == 16 && std::endian::native == std::endian::little);

// The most writes of a queue of `chunks` that are posted and not sent yet, rounded up to a power of
// two.
constexpr uint32_t tcp_ring_entries(uint32_t chunks) {
  return std::bit_ceil(chunks + kTcpRingSlack);
}

constexpr bool lies_within(const TcpFrame& frame, uint64_t memory_bytes) {
  return frame.bytes <= memory_bytes && frame.remote_offset <= memory_bytes - frame.bytes;
}

// All parsers throw Error that names the field; nothing is used before it is checked.

// The first 16 bytes of a hello or of its answer; `header.bytes` is in the type's bounds.
TcpHeader parse_tcp_header(std::span<const std::byte> message, const char* name);
TcpHello parse_tcp_hello(std::span<const std::byte> message);
// Throws Error(kMismatch) when the worker's sizes are not those of `layout`.
void check_tcp_hello(const TcpHello& hello, const LinkLayout& layout);
// If the answer is a refusal, throws the Error that it carries.
TcpWelcome parse_tcp_answer(std::span<const std::byte> message);
std::vector<std::byte> make_tcp_refusal(ErrorCode code, std::string_view reason);

}  // namespace phub
