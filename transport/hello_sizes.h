// What the hello of one queue says of sizes, over any socket, is what the box has.
#pragma once

#include <fmt/format.h>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/transport.h"

namespace phub {

// Throws Error that names the first difference.
template <typename Hello>
void check_hello_sizes(const Hello& hello, const LinkLayout& layout) {
  check_same("queues", hello.queues, layout.queues_in_all());
  if (!layout.has_queue(hello.queue)) {
    fail(ErrorCode::kInvalid, "hello: queue {} of {}; this box has {} from queue {} on",
         hello.queue, layout.queues_in_all(), layout.queue_chunks.size(), layout.first_queue);
  }
  check_same(fmt::format("chunks of queue {}", hello.queue), hello.queue_chunks,
             layout.queue_chunks[hello.queue - layout.first_queue]);
  check_same("bytes of gradients", hello.gradient_bytes, layout.gradients_at_worker());
  check_same("bytes of results", hello.result_bytes, layout.results_at_worker());
}

}  // namespace phub
