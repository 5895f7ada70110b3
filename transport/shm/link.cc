// The worker's side: shows its ticket, checks what it is given, maps it.
#include <poll.h>
#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "transport/error.h"
#include "transport/fd.h"
#include "transport/shm/endpoint.h"
#include "transport/shm/format.h"
#include "transport/shm/socket.h"
#include "transport/shm/transport.h"
#include "transport/worker_memory.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxGreetingBytes =
    sizeof(ShmWelcome) + kShmMaxQueues * sizeof(ShmQueue) + kMaxRefusalBytes;

class ShmWorkerLink final : public WorkerLink {
 public:
  ShmWorkerLink(Fd socket, const ShmGreeting& greeting, const LinkLayout& layout,
                std::vector<Fd> fds);
  ~ShmWorkerLink() override;

  std::span<std::byte> gradients() override { return gradients_; }
  std::span<const std::byte> results() override { return results_; }
  Endpoint& endpoint() override { return endpoint_; }
  bool connected() override;
  bool zero_copy() const override { return true; }

 private:
  Fd socket_;
  ClosedOnFork not_in_children_;
  SealedMemory results_memory_, gradients_memory_, rings_memory_;
  Fd wake_;                    // the reading end of a pipe that the box writes
  std::vector<Fd> doorbells_;  // by queue: eventfds of the box's cores
  std::span<std::byte> gradients_;
  std::span<const std::byte> results_;
  ShmEndpoint endpoint_;
  std::atomic<bool> closed_ = false;
};

ShmWorkerLink::ShmWorkerLink(Fd socket, const ShmGreeting& greeting, const LinkLayout& layout,
                             std::vector<Fd> fds)
    : socket_(std::move(socket)),
      not_in_children_(socket_.get()),
      endpoint_(greeting.welcome.queues, 1) {
  const ShmWelcome& welcome = greeting.welcome;
  PHUB_CHECK(fds.size() == kShmFixedFds + greeting.queues.size());
  results_memory_ =
      SealedMemory::adopt("phub-results", fds[0], welcome.results_file_bytes, MemoryAccess::kRead);
  gradients_memory_ = SealedMemory::adopt("phub-gradients", fds[1], welcome.gradients_file_bytes,
                                          MemoryAccess::kReadWrite);
  rings_memory_ =
      SealedMemory::adopt("phub-rings", fds[2], welcome.rings_file_bytes, MemoryAccess::kReadWrite);
  results_ = results_memory_.bytes().subspan(layout.result_copy * layout.results_bytes,
                                             layout.results_bytes);
  gradients_ = gradients_memory_.bytes().subspan(welcome.gradients_offset, welcome.gradients_bytes);
  wake_ = std::move(fds[3]);

  // The end of the socket wakes a sleeper too: the box is gone.
  endpoint_.watch(wake_.get(), EPOLLIN);
  endpoint_.watch(socket_.get(), EPOLLRDHUP);
  endpoint_.set_drain(wake_.get());
  const auto ring_at = [this](uint64_t offset) {
    return reinterpret_cast<ShmRing*>(rings_memory_.bytes().data() + offset);
  };
  for (uint32_t i = 0; i < greeting.queues.size(); ++i) {
    const ShmQueue& queue = greeting.queues[i];
    doorbells_.push_back(std::move(fds[kShmFixedFds + i]));
    endpoint_.open(
        {.queue = i}, ShmConsumer(ring_at(queue.to_worker_offset), queue.to_worker_entries),
        ShmProducer(ring_at(queue.to_box_offset), queue.to_box_entries), doorbells_.back().get());
  }
}

ShmWorkerLink::~ShmWorkerLink() {
  bury(std::move(results_memory_));
  bury(std::move(gradients_memory_));
}

bool ShmWorkerLink::connected() {
  if (closed_.load(std::memory_order_relaxed)) return false;
  pollfd socket = {socket_.get(), POLLRDHUP, 0};
  if (::poll(&socket, 1, 0) > 0) closed_.store(true, std::memory_order_relaxed);
  return !closed_.load(std::memory_order_relaxed);
}

// The next message from the box. Throws Error when it closes the connection or at the deadline.
UnixMessage next_message(int socket, Clock::time_point deadline, const std::string& path) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) fail(ErrorCode::kTimeout, "'{}': the server does not answer", path);
    pollfd readable = {socket, POLLIN, 0};
    ::poll(&readable, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    UnixMessage received = receive_message(socket, kMaxGreetingBytes);
    // A reset is reported once, before the data sent ahead of it, which may be a refusal.
    if (received.error == ECONNRESET) received = receive_message(socket, kMaxGreetingBytes);
    if (received.error == EAGAIN) continue;
    if (received.error != 0) fail_system(fmt::format("receiving from '{}'", path), received.error);
    if (received.bytes.empty()) {
      fail(ErrorCode::kUnavailable, "'{}': the server closed the connection", path);
    }
    return received;
  }
}

// Adds the message's descriptors to `fds`. Throws Error when they are not as many as it announces.
void collect(UnixMessage& received, uint32_t announced, std::vector<Fd>& fds) {
  if (announced == 0 || received.fds.size() != announced) {
    fail(ErrorCode::kInvalid, "welcome: {} descriptors announced, {} received", announced,
         received.fds.size());
  }
  std::move(received.fds.begin(), received.fds.end(), std::back_inserter(fds));
}

}  // namespace

std::unique_ptr<WorkerLink> connect_shm(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms) {
  check_offer(offer, "shm", nullptr);
  ShmHello hello;
  std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());

  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  Fd socket = connect_to(offer.address, timeout_ms);
  // EPIPE: refused already; the reason can still be received.
  const int error = send_message(socket.get(), std::as_bytes(std::span(&hello, 1)));
  if (error != 0 && error != EPIPE && error != ECONNRESET) {
    fail_system(fmt::format("sending to '{}'", offer.address), error);
  }

  UnixMessage received = next_message(socket.get(), deadline, offer.address);
  const ShmGreeting greeting = parse_shm_greeting(received.bytes);
  check_shm_greeting(greeting, layout);
  std::vector<Fd> fds;
  collect(received, greeting.welcome.header.fds, fds);
  while (fds.size() < greeting.welcome.total_fds) {
    received = next_message(socket.get(), deadline, offer.address);
    collect(received, parse_shm_more(received.bytes), fds);
  }
  if (fds.size() > greeting.welcome.total_fds) {
    fail(ErrorCode::kInvalid, "welcome: {} descriptors announced, {} received",
         greeting.welcome.total_fds, fds.size());
  }
  return std::make_unique<ShmWorkerLink>(std::move(socket), greeting, layout, std::move(fds));
}

}  // namespace phub
