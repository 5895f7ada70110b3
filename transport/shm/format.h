// The bytes that two processes share: the messages on the Unix socket and the rings in memory.
// README.md describes the same; a test holds the two together. Little endian.
#pragma once

#include <array>
#include <atomic>
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

inline constexpr uint32_t kShmMagic = 0x42554850;  // "PHUB" in memory order
inline constexpr uint32_t kShmVersion = 1;
inline constexpr uint32_t kShmFdsPerMessage = 250;  // Linux passes at most 253 at once
inline constexpr uint32_t kShmFixedFds = 4;         // results, gradients, rings, wake-up pipe
inline constexpr uint32_t kShmMaxQueues = 1024;
inline constexpr uint32_t kShmRingSlack = 16;  // entries beyond the queue's chunks
inline constexpr uint32_t kShmMaxRingEntries = 1u << 23;
inline constexpr uint32_t kShmLine = 128;      // two cache lines: the prefetcher fetches pairs
inline constexpr uint32_t kShmSkewRanks = 31;  // gradients begin at (rank % 31) * 128

enum class ShmMessage : uint32_t { kHello = 0, kWelcome = 1, kMoreFds = 2, kRefusal = 3 };

struct ShmHeader {
  uint32_t magic = kShmMagic;
  uint32_t version = kShmVersion;
  ShmMessage type = ShmMessage::kHello;
  uint32_t fds = 0;  // descriptors that come with this message
};
struct ShmHello {
  ShmHeader header;
  std::array<char, kTicketDigits> ticket = {};
};
// Followed by `queues` times ShmQueue. A refusal is a ShmHeader followed by text, "code: sentence".
struct ShmWelcome {
  ShmHeader header;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint32_t queues = 0;
  uint32_t total_fds = 0;  // kShmFixedFds + queues, over this and the kMoreFds messages
  uint64_t results_file_bytes = 0;
  uint64_t results_bytes = 0;
  uint64_t gradients_file_bytes = 0;
  uint64_t gradients_offset = 0;
  uint64_t gradients_bytes = 0;
  uint64_t rings_file_bytes = 0;
};
struct ShmQueue {  // offsets into the file of rings, multiples of kShmLine
  uint64_t to_box_offset = 0;
  uint64_t to_worker_offset = 0;
  uint32_t to_box_entries = 0;  // powers of two
  uint32_t to_worker_entries = 0;
};
static_assert(sizeof(ShmHeader) == 16 && sizeof(ShmHello) == 48);
static_assert(sizeof(ShmWelcome) == 80 && sizeof(ShmQueue) == 24);
static_assert(std::endian::native == std::endian::little);

// One ring: this, then its entries. All zero is an empty ring whose consumer is awake. Positions
// count entries since the ring was made and wrap at 2^32; position p is entry p mod entries.
struct ShmRing {
  alignas(kShmLine) std::atomic<uint32_t> tail;     // written by the producer only
  alignas(kShmLine) std::atomic<uint32_t> head;     // written by the consumer only
  alignas(kShmLine) std::atomic<uint64_t> wake_at;  // kShmArmed | position, or 0: do not wake

  std::atomic<uint32_t>* entries() { return reinterpret_cast<std::atomic<uint32_t>*>(this + 1); }
};
inline constexpr uint64_t kShmArmed = 1ull << 32;
static_assert(sizeof(ShmRing) == 3 * kShmLine && offsetof(ShmRing, wake_at) == 2 * kShmLine);
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

constexpr uint64_t shm_ring_bytes(uint32_t entries) { return sizeof(ShmRing) + 4ull * entries; }

// Room for the immediates in flight on a queue of `chunks`, rounded up to a power of two.
constexpr uint32_t shm_ring_entries(uint32_t chunks) {
  return std::bit_ceil(chunks + kShmRingSlack);
}

// All parsers throw Error that names the field; nothing is used before it is checked.
ShmHello parse_shm_hello(std::span<const std::byte> message);

struct ShmGreeting {
  ShmWelcome welcome;
  std::vector<ShmQueue> queues;
};
std::vector<std::byte> make_shm_refusal(ErrorCode code, std::string_view reason);
// If the answer is a refusal, throws the Error that it carries.
ShmGreeting parse_shm_greeting(std::span<const std::byte> message);
// The number of descriptors that come with a message of type kMoreFds.
uint32_t parse_shm_more(std::span<const std::byte> message);
// Throws Error(kMismatch) when the box's sizes are not those of `layout`.
void check_shm_greeting(const ShmGreeting& greeting, const LinkLayout& layout);

}  // namespace phub
