#include "transport/shm_box.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "numa/memory.h"
#include "transport/error.h"
#include "transport/shm_socket.h"
#include "transport/ticket.h"

namespace phub {
namespace {

const LinkLayout& checked(const LinkLayout& layout) {
  const auto expect = [](bool condition, const char* name, uint64_t value) {
    if (!condition) fail(ErrorCode::kInvalid, "shm job: {} {} is out of range", name, value);
  };
  expect(layout.max_ranks >= 1 && layout.max_ranks <= kMaxRanks, "max_ranks", layout.max_ranks);
  expect(layout.cores >= 1 && layout.cores <= kShmMaxQueues, "cores", layout.cores);
  expect(layout.queue_chunks.size() == layout.cores, "number of queues",
         layout.queue_chunks.size());
  expect(layout.core_node.empty() || layout.core_node.size() == layout.cores, "number of nodes",
         layout.core_node.size());
  for (uint32_t q = 0; q < layout.cores; ++q) {
    expect(layout.core_of(q) == q, "core of queue", q);
  }
  for (const uint32_t chunks : layout.queue_chunks) {
    expect(chunks <= kMaxChunksPerQueue, "chunks of a queue", chunks);
  }
  const uint64_t most = kShmMaxFileBytes / 2;
  expect(layout.ingress_bytes >= 1 && layout.ingress_bytes <= most, "ingress_bytes",
         layout.ingress_bytes);
  expect(layout.egress_bytes >= 1 && layout.egress_bytes <= most, "egress_bytes",
         layout.egress_bytes);
  expect(layout.egress_copies == 1 || layout.egress_copies == layout.max_ranks, "egress_copies",
         layout.egress_copies);
  return layout;
}

ShmRing* ring_at(const ShmMemory& rings, uint64_t offset) {
  return reinterpret_cast<ShmRing*>(rings.bytes().data() + offset);
}

}  // namespace

ShmCoreEndpoint::ShmCoreEndpoint(const ShmBoxLink& link, uint32_t core, uint32_t max_ranks)
    : ShmEndpoint(max_ranks), link_(link), core_(core), attached_(max_ranks) {}

void ShmCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  ShmIncarnation* present = link_.present(rank);
  PHUB_CHECK(present != nullptr && present->incarnation == incarnation);
  const ShmQueue& queue = present->queues[core_];
  open(rank, ShmConsumer(ring_at(present->rings, queue.to_box_offset), queue.to_box_entries),
       ShmProducer(ring_at(present->rings, queue.to_worker_offset), queue.to_worker_entries),
       present->wake_write.get());
  attached_[rank] = present;
  present->attached.fetch_add(1, std::memory_order_relaxed);
}

void ShmCoreEndpoint::detach(uint32_t rank) {
  close(rank);
  // Everything that this core did with the memory is before what revoke() does to it.
  std::exchange(attached_[rank], nullptr)->attached.fetch_sub(1, std::memory_order_release);
}

ShmBoxLink::ShmBoxLink(ShmRegistry& registry, const LinkLayout& layout)
    : registry_(registry),
      layout_(checked(layout)),
      results_(ShmMemory::create("phub-results", round_up_to_page(layout.all_egress_bytes()),
                                 ShmAccess::kReadWrite, /*peers_write=*/false)),
      incarnations_(layout.max_ranks),
      present_(layout.max_ranks) {
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    endpoints_.push_back(std::make_unique<ShmCoreEndpoint>(*this, core, layout_.max_ranks));
  }
  place_results(results_.bytes(), layout_);
}

ShmBoxLink::~ShmBoxLink() {
  for (uint32_t rank = 0; rank < layout_.max_ranks; ++rank) {
    if (incarnations_[rank] != nullptr) revoke(rank);
  }
  close();
}

void ShmBoxLink::close() {
  if (std::exchange(listed_, false)) std::erase(registry_.links, this);
}

std::span<std::byte> ShmBoxLink::egress() {
  return results_.bytes().first(layout_.all_egress_bytes());
}

Endpoint& ShmBoxLink::endpoint(uint32_t core) {
  PHUB_CHECK(core < endpoints_.size());
  return *endpoints_[core];
}

Offer ShmBoxLink::admit(uint32_t rank, uint32_t incarnation) {
  if (rank >= layout_.max_ranks) {
    fail(ErrorCode::kInvalid, "rank {}: this job has memory for {} ranks", rank, layout_.max_ranks);
  }
  PHUB_CHECK(incarnations_[rank] == nullptr);
  std::unique_ptr<ShmIncarnation> made = make(rank, incarnation);
  Offer offer = {.transport = "shm", .address = registry_.address, .ticket = made->ticket};
  list();
  size_t watched = 0;
  try {
    for (; watched < layout_.cores; ++watched) {
      endpoints_[watched]->watch(made->doorbells[watched].get(), EPOLLIN);
    }
  } catch (...) {
    while (watched-- > 0) endpoints_[watched]->unwatch(made->doorbells[watched].get());
    throw;
  }
  present_[rank].store(made.get(), std::memory_order_release);
  incarnations_[rank] = std::move(made);
  return offer;
}

void ShmBoxLink::list() {
  if (!listed_) registry_.links.push_back(this);
  listed_ = true;
}

std::unique_ptr<ShmIncarnation> ShmBoxLink::make(uint32_t rank, uint32_t incarnation) const {
  auto made = std::make_unique<ShmIncarnation>();
  made->id = registry_.next_id++;
  made->rank = rank;
  made->incarnation = incarnation;
  made->ticket = make_ticket();
  // Equal addresses of all ranks' slots modulo 4 KiB would compete for the same cache sets.
  made->gradients_offset = uint64_t{rank % kShmSkewRanks} * kShmLine;
  made->gradients = ShmMemory::create(
      "phub-gradients", round_up_to_page(made->gradients_offset + layout_.ingress_bytes),
      ShmAccess::kRead, /*peers_write=*/true);
  place(made->gradients.bytes().subspan(made->gradients_offset), layout_.gradient_bytes,
        layout_.runs);
  make_rings(*made);

  std::array<int, 2> ends = {-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    fail_system(fmt::format("pipe2 of the wake-up of rank {}", rank), errno);
  }
  made->wake_read = ShmFd(ends[0]);
  made->wake_write = ShmFd(ends[1]);
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    made->doorbells.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!made->doorbells.back()) {
      fail_system(fmt::format("eventfd of the doorbell of rank {} at core {}", rank, core), errno);
    }
  }
  return made;
}

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
  made.rings = ShmMemory::create("phub-rings", bytes, ShmAccess::kReadWrite, /*peers_write=*/true);
  for (uint32_t core = 0; core < layout_.core_node.size(); ++core) {
    numa::prefer_node(made.rings.bytes().subspan(begin[core], begin[core + 1] - begin[core]),
                      layout_.core_node[core]);
  }
}

std::span<const std::byte> ShmBoxLink::ingress(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && incarnations_[rank] != nullptr);
  const ShmIncarnation& made = *incarnations_[rank];
  return made.gradients.bytes().subspan(made.gradients_offset, layout_.ingress_bytes);
}

BoxLink::Rest ShmBoxLink::revoke(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && incarnations_[rank] != nullptr);
  ShmIncarnation& made = *incarnations_[rank];
  PHUB_CHECK(made.attached.load(std::memory_order_acquire) == 0);
  present_[rank].store(nullptr, std::memory_order_relaxed);
  // The worker holds the same open files: closing ours would not end what epoll watches.
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    endpoints_[core]->unwatch(made.doorbells[core].get());
  }
  if (made.socket) {
    epoll_ctl(registry_.epoll.get(), EPOLL_CTL_DEL, made.socket.get(), nullptr);
    made.socket.reset();  // before the pipe: who is woken by its end finds the connection closed
  }
  made.wake_write.reset();
  Rest memory = std::make_shared<std::pair<ShmMemory, ShmMemory>>(std::move(made.gradients),
                                                                  std::move(made.rings));
  incarnations_[rank].reset();
  return memory;
}

ShmIncarnation* ShmBoxLink::present(uint32_t rank) const {
  PHUB_CHECK(rank < present_.size());
  return present_[rank].load(std::memory_order_acquire);
}

ShmIncarnation* ShmBoxLink::find_ticket(std::string_view ticket) {
  ShmIncarnation* found = nullptr;
  for (const auto& made : incarnations_) {
    if (made != nullptr && same_ticket(made->ticket, ticket)) found = made.get();
  }
  return found;
}

ShmIncarnation* ShmBoxLink::find_connection(uint64_t id) {
  for (const auto& made : incarnations_) {
    if (made != nullptr && made->id == id) return made.get();
  }
  return nullptr;
}

void ShmBoxLink::welcome(ShmIncarnation& made, ShmFd& socket) {
  std::vector<int> fds = {results_.fd().get(), made.gradients.fd().get(), made.rings.fd().get(),
                          made.wake_read.get()};
  for (const ShmFd& doorbell : made.doorbells) fds.push_back(doorbell.get());

  ShmWelcome welcome;
  welcome.header.type = ShmMessage::kWelcome;
  welcome.header.fds = static_cast<uint32_t>(std::min<size_t>(fds.size(), kShmFdsPerMessage));
  welcome.rank = made.rank;
  welcome.incarnation = made.incarnation;
  welcome.queues = layout_.cores;
  welcome.total_fds = static_cast<uint32_t>(fds.size());
  welcome.results_file_bytes = results_.bytes().size();
  welcome.results_bytes = layout_.all_egress_bytes();
  welcome.gradients_file_bytes = made.gradients.bytes().size();
  welcome.gradients_offset = made.gradients_offset;
  welcome.gradients_bytes = layout_.ingress_bytes;
  welcome.rings_file_bytes = made.rings.bytes().size();

  std::vector<std::byte> message(sizeof(welcome) + made.queues.size() * sizeof(ShmQueue));
  std::memcpy(message.data(), &welcome, sizeof(welcome));
  std::memcpy(message.data() + sizeof(welcome), made.queues.data(),
              made.queues.size() * sizeof(ShmQueue));
  std::span<const int> rest = fds;
  for (uint32_t count = welcome.header.fds; !rest.empty();) {
    const int error = send_message(socket.get(), message, rest.first(count));
    if (error != 0) fail_system(fmt::format("answering rank {}", made.rank), error);
    rest = rest.subspan(count);
    count = static_cast<uint32_t>(std::min<size_t>(rest.size(), kShmFdsPerMessage));
    const ShmHeader more = {kShmMagic, kShmVersion, ShmMessage::kMoreFds, count};
    message.resize(sizeof(more));
    std::memcpy(message.data(), &more, sizeof(more));
  }
  made.ticket_used = true;
  made.socket = std::move(socket);
  // The worker has its own now; the mappings stay.
  made.gradients.close_fd();
  made.rings.close_fd();
}

}  // namespace phub
