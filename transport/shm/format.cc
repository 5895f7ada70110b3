#include "transport/shm/format.h"

#include <string>

#include "transport/error.h"
#include "transport/sealed_memory.h"

namespace phub {
namespace {

void check_range(const char* name, uint64_t offset, uint64_t bytes, uint64_t file_bytes) {
  if (file_bytes > kMaxSealedBytes || offset > file_bytes || bytes > file_bytes - offset) {
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
  const ShmHeader header = read_header<ShmHeader>("hello", message);
  if (header.type != ShmMessage::kHello || header.fds != 0 || message.size() != sizeof(ShmHello)) {
    fail(ErrorCode::kInvalid, "hello: message type {} with {} bytes and {} descriptors",
         static_cast<uint32_t>(header.type), message.size(), header.fds);
  }
  const ShmHello hello = read_as<ShmHello>(message);
  check_ticket(hello.ticket);
  return hello;
}

std::vector<std::byte> make_shm_refusal(ErrorCode code, std::string_view reason) {
  const ShmHeader header = {.type = ShmMessage::kRefusal};
  const std::string text = refusal_text(code, reason);
  return make_message(header, std::as_bytes(std::span(text)));
}

ShmGreeting parse_shm_greeting(std::span<const std::byte> message) {
  const ShmHeader header = read_header<ShmHeader>("welcome", message);
  if (header.type == ShmMessage::kRefusal) throw parse_refusal(message.subspan(sizeof(ShmHeader)));
  if (header.type != ShmMessage::kWelcome || message.size() < sizeof(ShmWelcome)) {
    fail(ErrorCode::kInvalid, "welcome: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  ShmGreeting greeting;
  greeting.welcome = read_as<ShmWelcome>(message);
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
    const auto queue = read_as<ShmQueue>(message, sizeof(ShmWelcome) + i * sizeof(ShmQueue));
    check_ring("ring to the box", queue.to_box_offset, queue.to_box_entries,
               welcome.rings_file_bytes);
    check_ring("ring to the worker", queue.to_worker_offset, queue.to_worker_entries,
               welcome.rings_file_bytes);
    greeting.queues.push_back(queue);
  }
  return greeting;
}

uint32_t parse_shm_more(std::span<const std::byte> message) {
  const ShmHeader header = read_header<ShmHeader>("more descriptors", message);
  if (header.type != ShmMessage::kMoreFds || message.size() != sizeof(ShmHeader) ||
      header.fds == 0 || header.fds > kShmFdsPerMessage) {
    fail(ErrorCode::kInvalid, "more descriptors: message type {} with {} bytes, {} descriptors",
         static_cast<uint32_t>(header.type), message.size(), header.fds);
  }
  return header.fds;
}

void check_shm_greeting(const ShmGreeting& greeting, const LinkLayout& layout) {
  const ShmWelcome& welcome = greeting.welcome;
  check_same("bytes of gradients", layout.slots_bytes, welcome.gradients_bytes);
  check_same("bytes of results", layout.all_results_bytes(), welcome.results_bytes);
  check_same("queues", layout.queue_chunks.size(), welcome.queues);
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
