#include "transport/shm_format.h"

#include <cstring>
#include <string>

#include "transport/error.h"

namespace phub {
namespace {

template <typename T>
T take(std::span<const std::byte> message, size_t offset = 0) {
  T value;
  std::memcpy(&value, message.data() + offset, sizeof(T));
  return value;
}

ShmHeader parse_header(std::span<const std::byte> message, const char* name) {
  if (message.size() < sizeof(ShmHeader)) {
    fail(ErrorCode::kInvalid, "{}: {} bytes, at least {} expected", name, message.size(),
         sizeof(ShmHeader));
  }
  const ShmHeader header = take<ShmHeader>(message);
  if (header.magic != kShmMagic) {
    fail(ErrorCode::kInvalid, "{}: magic {:#x}, {:#x} expected: not a phub peer", name,
         header.magic, kShmMagic);
  }
  if (header.version != kShmVersion) {
    fail(ErrorCode::kInvalid, "{}: protocol version {}, this side speaks {}; upgrade the older one",
         name, header.version, kShmVersion);
  }
  return header;
}

[[noreturn]] void throw_refusal(std::span<const std::byte> message) {
  const std::span<const std::byte> tail = message.subspan(sizeof(ShmHeader));
  std::string text(reinterpret_cast<const char*>(tail.data()), tail.size());
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  const size_t colon = text.find(": ");
  if (colon == std::string::npos) fail(ErrorCode::kInternal, "refused by the server: {}", text);
  fail(parse_error_code(text.substr(0, colon)), "refused by the server: {}",
       text.substr(colon + 2));
}

void check_range(const char* name, uint64_t offset, uint64_t bytes, uint64_t file_bytes) {
  if (file_bytes > kShmMaxFileBytes || offset > file_bytes || bytes > file_bytes - offset) {
    fail(ErrorCode::kInvalid, "welcome: {} at {} with {} bytes does not fit its file of {}", name,
         offset, bytes, file_bytes);
  }
}

void check_ring(const char* name, uint64_t offset, uint32_t entries, uint64_t file_bytes) {
  if (!std::has_single_bit(entries) || entries > kShmMaxRingEntries || offset % kShmLine != 0) {
    fail(ErrorCode::kInvalid, "welcome: {} of {} entries at offset {}", name, entries, offset);
  }
  check_range(name, offset, shm_ring_bytes(entries), file_bytes);
}

}  // namespace

ShmHello parse_shm_hello(std::span<const std::byte> message) {
  const ShmHeader header = parse_header(message, "hello");
  if (header.type != ShmMessage::kHello || header.fds != 0 || message.size() != sizeof(ShmHello)) {
    fail(ErrorCode::kInvalid, "hello: message type {} with {} bytes and {} descriptors",
         static_cast<uint32_t>(header.type), message.size(), header.fds);
  }
  const ShmHello hello = take<ShmHello>(message);
  for (const char c : hello.ticket) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
      fail(ErrorCode::kUnauthorized, "hello: the ticket is not {} hexadecimal digits",
           kShmTicketDigits);
    }
  }
  return hello;
}

ShmGreeting parse_shm_greeting(std::span<const std::byte> message) {
  const ShmHeader header = parse_header(message, "welcome");
  if (header.type == ShmMessage::kRefusal) throw_refusal(message);
  if (header.type != ShmMessage::kWelcome || message.size() < sizeof(ShmWelcome)) {
    fail(ErrorCode::kInvalid, "welcome: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  ShmGreeting greeting;
  greeting.welcome = take<ShmWelcome>(message);
  const ShmWelcome& welcome = greeting.welcome;
  if (welcome.queues == 0 || welcome.queues > kShmMaxQueues ||
      message.size() != sizeof(ShmWelcome) + welcome.queues * sizeof(ShmQueue) ||
      welcome.total_fds != kShmFixedFds + welcome.queues || header.fds > welcome.total_fds) {
    fail(ErrorCode::kInvalid, "welcome: {} queues and {} descriptors in {} bytes", welcome.queues,
         welcome.total_fds, message.size());
  }
  check_range("results", 0, welcome.results_bytes, welcome.results_file_bytes);
  check_range("gradients", welcome.gradients_offset, welcome.gradients_bytes,
              welcome.gradients_file_bytes);
  if (welcome.gradients_offset % kShmLine != 0) {
    fail(ErrorCode::kInvalid, "welcome: gradients at offset {}, a multiple of {} expected",
         welcome.gradients_offset, kShmLine);
  }
  for (uint32_t i = 0; i < welcome.queues; ++i) {
    const auto queue = take<ShmQueue>(message, sizeof(ShmWelcome) + i * sizeof(ShmQueue));
    check_ring("ring to the box", queue.to_box_offset, queue.to_box_entries,
               welcome.rings_file_bytes);
    check_ring("ring to the worker", queue.to_worker_offset, queue.to_worker_entries,
               welcome.rings_file_bytes);
    greeting.queues.push_back(queue);
  }
  return greeting;
}

uint32_t parse_shm_more(std::span<const std::byte> message) {
  const ShmHeader header = parse_header(message, "more descriptors");
  if (header.type != ShmMessage::kMoreFds || message.size() != sizeof(ShmHeader) ||
      header.fds == 0 || header.fds > kShmFdsPerMessage) {
    fail(ErrorCode::kInvalid, "more descriptors: message type {} with {} bytes, {} descriptors",
         static_cast<uint32_t>(header.type), message.size(), header.fds);
  }
  return header.fds;
}

void check_shm_greeting(const ShmGreeting& greeting, const LinkLayout& layout) {
  const ShmWelcome& welcome = greeting.welcome;
  const auto expect = [](const char* name, uint64_t here, uint64_t there) {
    if (here == there) return;
    fail(ErrorCode::kMismatch,
         "{}: {} by this worker's plan and {} at the server; do both run the "
         "same version?",
         name, here, there);
  };
  expect("bytes of gradients", layout.ingress_bytes, welcome.gradients_bytes);
  expect("bytes of results", layout.all_egress_bytes(), welcome.results_bytes);
  expect("queues", layout.queue_chunks.size(), welcome.queues);
  for (uint32_t i = 0; i < welcome.queues; ++i) {
    const ShmQueue& queue = greeting.queues[i];
    const uint32_t least = layout.queue_chunks[i] + kShmRingSlack;
    if (queue.to_box_entries < least || queue.to_worker_entries < least) {
      fail(ErrorCode::kMismatch, "queue {}: rings of {} and {} entries for {} chunks", i,
           queue.to_box_entries, queue.to_worker_entries, layout.queue_chunks[i]);
    }
  }
}

}  // namespace phub
