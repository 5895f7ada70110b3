// The messages of the shm transport's socket, as the box and as the worker read them.
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/error.h"
#include "transport/shm/format.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  const auto message = std::as_bytes(std::span(data, size));
  try {
    const ShmHello hello = parse_shm_hello(message);
    for (const char digit : hello.ticket) PHUB_CHECK(digit >= '0' && digit <= 'f');
  } catch (const Error&) {
  }
  try {
    parse_shm_more(message);
  } catch (const Error&) {
  }
  try {
    const ShmGreeting greeting = parse_shm_greeting(message);
    // What was accepted can be used without another look.
    const ShmWelcome& welcome = greeting.welcome;
    PHUB_CHECK(welcome.results_bytes <= welcome.results_file_bytes);
    PHUB_CHECK(welcome.gradients_offset + welcome.gradients_bytes <= welcome.gradients_file_bytes);
    PHUB_CHECK(greeting.queues.size() == welcome.queues);
    for (const ShmQueue& queue : greeting.queues) {
      PHUB_CHECK(queue.to_box_offset + shm_ring_bytes(queue.to_box_entries) <=
                 welcome.rings_file_bytes);
      PHUB_CHECK(queue.to_worker_offset + shm_ring_bytes(queue.to_worker_entries) <=
                 welcome.rings_file_bytes);
    }
    LinkLayout layout;
    layout.slots_bytes = welcome.gradients_bytes;
    layout.results_bytes = welcome.results_bytes;
    layout.queue_chunks.assign(welcome.queues, 1);
    check_shm_greeting(greeting, layout);
  } catch (const Error&) {
  }
  return 0;
}
