#include "transport/shm/box.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "numa/memory.h"
#include "transport/box_memory.h"
#include "transport/error.h"
#include "transport/shm/socket.h"

namespace phub {
namespace {

const LinkLayout& checked_for_shm(const LinkLayout& layout) {
  const auto expect = [](bool condition, const char* name, uint64_t value) {
    if (!condition) fail(ErrorCode::kInvalid, "shm job: {} {} is out of range", name, value);
  };
  checked(layout, "shm");
  expect(layout.cores <= kShmMaxQueues, "cores", layout.cores);
  expect(layout.queue_chunks.size() == layout.cores, "number of queues",
         layout.queue_chunks.size());
  expect(layout.core_node.empty() || layout.core_node.size() == layout.cores, "number of nodes",
         layout.core_node.size());
  for (uint32_t q = 0; q < layout.cores; ++q) {
    expect(layout.core_of(q) == q, "core of queue", q);
  }
  return layout;
}

ShmRing* ring_at(const SealedMemory& rings, uint64_t offset) {
  return reinterpret_cast<ShmRing*>(rings.bytes().data() + offset);
}

}  // namespace

ShmCoreEndpoint::ShmCoreEndpoint(ShmBoxLink& link, uint32_t core, uint32_t max_ranks)
    : ShmEndpoint(1, max_ranks), link_(link), core_(core) {}

void ShmCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  const auto& attached = static_cast<const ShmIncarnation&>(link_.attach(rank, incarnation));
  const ShmQueue& queue = attached.queues[core_];
  open({.rank = rank},
       ShmConsumer(ring_at(attached.rings, queue.to_box_offset), queue.to_box_entries),
       ShmProducer(ring_at(attached.rings, queue.to_worker_offset), queue.to_worker_entries),
       attached.wake_write.get());
}

void ShmCoreEndpoint::detach(uint32_t rank) {
  close({.rank = rank});
  link_.detach(rank);
}

ShmBoxLink::ShmBoxLink(Admissions& admissions, const std::string& address, const LinkLayout& layout)
    : AdmissionLink(admissions, checked_for_shm(layout).max_ranks),
      address_(address),
      layout_(layout),
      results_(SealedMemory::create("phub-results", round_up_to_page(layout.all_results_bytes()),
                                    MemoryAccess::kReadWrite, /*peers_write=*/false)) {
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    endpoints_.push_back(std::make_unique<ShmCoreEndpoint>(*this, core, layout_.max_ranks));
  }
  place_results(results_.bytes(), layout_);
}

std::span<std::byte> ShmBoxLink::results() {
  return results_.bytes().first(layout_.all_results_bytes());
}

BoxEndpoint& ShmBoxLink::endpoint(uint32_t core) {
  PHUB_CHECK(core < endpoints_.size());
  return *endpoints_[core];
}

// An exception leaves nothing behind: nobody else has these descriptors yet, so that closing them
// also removes them from the endpoints' epolls.
std::unique_ptr<Incarnation> ShmBoxLink::make(uint32_t rank) {
  auto made = std::make_unique<ShmIncarnation>();
  // Equal addresses of all ranks' slots modulo 4 KiB would compete for the same cache sets.
  made->gradients_offset = uint64_t{rank % kShmSkewRanks} * kShmLine;
  made->gradients = SealedMemory::create(
      "phub-gradients", round_up_to_page(made->gradients_offset + layout_.slots_bytes),
      MemoryAccess::kRead, /*peers_write=*/true);
  place(made->gradients.bytes().subspan(made->gradients_offset), 1, layout_.slot_runs);
  make_rings(*made);

  std::array<int, 2> ends = {-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    fail_system(fmt::format("pipe2 of the wake-up of rank {}", rank), errno);
  }
  made->wake_read = Fd(ends[0]);
  made->wake_write = Fd(ends[1]);
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    made->doorbells.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!made->doorbells.back()) {
      fail_system(fmt::format("eventfd of the doorbell of rank {} at core {}", rank, core), errno);
    }
    endpoints_[core]->watch(made->doorbells.back().get(), EPOLLIN);
  }
  return made;
}

Offer ShmBoxLink::open(Incarnation&) { return {.transport = "shm", .address = address_}; }

// The rings of each core on pages of their own, on the core's node. New memory is zero: empty rings
// whose consumers are awake.
void ShmBoxLink::make_rings(ShmIncarnation& made) const {
  std::vector<uint64_t> begin;
  uint64_t bytes = 0;
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    const uint32_t entries = shm_ring_entries(layout_.queue_chunks[core]);
    const uint64_t one = (shm_ring_bytes(entries) + kShmLine - 1) / kShmLine * kShmLine;
    begin.push_back(bytes);
    made.queues.push_back({bytes, bytes + one, entries, entries});
    bytes = round_up_to_page(bytes + 2 * one);
  }
  begin.push_back(bytes);
  made.rings =
      SealedMemory::create("phub-rings", bytes, MemoryAccess::kReadWrite, /*peers_write=*/true);
  for (uint32_t core = 0; core < layout_.core_node.size(); ++core) {
    numa::prefer_node(made.rings.bytes().subspan(begin[core], begin[core + 1] - begin[core]),
                      layout_.core_node[core]);
  }
}

std::span<const std::byte> ShmBoxLink::slots(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && current(rank) != nullptr);
  const auto& incarnation = static_cast<const ShmIncarnation&>(*current(rank));
  return incarnation.gradients.bytes().subspan(incarnation.gradients_offset, layout_.slots_bytes);
}

void ShmBoxLink::disconnect(Incarnation& ended) {
  auto& incarnation = static_cast<ShmIncarnation&>(ended);
  // The worker has the same files open: closing ours would not remove them from the epolls.
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    endpoints_[core]->unwatch(incarnation.doorbells[core].get());
  }
  if (incarnation.socket) {
    epoll_ctl(admissions_.epoll.get(), EPOLL_CTL_DEL, incarnation.socket.get(), nullptr);
    incarnation.socket.reset();  // before the pipe: who is woken by its end finds this closed
  }
  incarnation.wake_write.reset();
}

BoxLink::HeldMemory ShmBoxLink::memory_of(Incarnation& ended) {
  auto& incarnation = static_cast<ShmIncarnation&>(ended);
  return std::make_shared<std::pair<SealedMemory, SealedMemory>>(std::move(incarnation.gradients),
                                                                 std::move(incarnation.rings));
}

void ShmBoxLink::welcome(ShmIncarnation& incarnation, Fd& socket) {
  if (incarnation.socket) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already; join again",
         incarnation.rank);
  }
  // A connected worker sends nothing on its socket: any event there is the end. The
  // socket stays open until revoke(), which the cores come before.
  const uint64_t id = admissions_.adopt(incarnation, socket.get(), EPOLLIN | EPOLLRDHUP);
  send_welcome(incarnation, socket.get());
  incarnation.socket = std::move(socket);
  // The worker has its own now; the mappings stay.
  incarnation.gradients.close_fd();
  incarnation.rings.close_fd();
  watch_process(incarnation, id);
}

// A child of a dead worker may still hold its socket open, so the end of its process is watched
// too. Where the kernel cannot do that, the socket alone has to do.
void ShmBoxLink::watch_process(ShmIncarnation& incarnation, uint64_t id) const {
  incarnation.process = open_peer(incarnation.socket.get());
  if (!incarnation.process) return;
  try {
    admissions_.watch(incarnation.process.get(), id, EPOLLIN | EPOLLONESHOT);
  } catch (const Error&) {
    incarnation.process.reset();
  }
}

void ShmBoxLink::send_welcome(const ShmIncarnation& incarnation, int socket) const {
  std::vector<int> fds = {results_.fd().get(), incarnation.gradients.fd().get(),
                          incarnation.rings.fd().get(), incarnation.wake_read.get()};
  for (const Fd& doorbell : incarnation.doorbells) fds.push_back(doorbell.get());

  ShmWelcome welcome;
  welcome.header.type = ShmMessage::kWelcome;
  welcome.header.fds = static_cast<uint32_t>(std::min<size_t>(fds.size(), kShmFdsPerMessage));
  welcome.rank = incarnation.rank;
  welcome.incarnation = incarnation.incarnation;
  welcome.queues = layout_.cores;
  welcome.total_fds = static_cast<uint32_t>(fds.size());
  welcome.results_file_bytes = results_.bytes().size();
  welcome.results_bytes = layout_.all_results_bytes();
  welcome.gradients_file_bytes = incarnation.gradients.bytes().size();
  welcome.gradients_offset = incarnation.gradients_offset;
  welcome.gradients_bytes = layout_.slots_bytes;
  welcome.rings_file_bytes = incarnation.rings.bytes().size();

  const auto queues = std::as_bytes(std::span(incarnation.queues));
  std::vector<std::byte> message = make_message(welcome, queues);
  std::span<const int> rest = fds;
  for (uint32_t count = welcome.header.fds; !rest.empty();) {
    const int error = send_message(socket, message, rest.first(count));
    if (error != 0) fail_system(fmt::format("answering rank {}", incarnation.rank), error);
    rest = rest.subspan(count);
    count = static_cast<uint32_t>(std::min<size_t>(rest.size(), kShmFdsPerMessage));
    message = make_message(ShmHeader{.type = ShmMessage::kMoreFds, .fds = count}, {});
  }
}

}  // namespace phub
