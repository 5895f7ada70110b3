#include "transport/tcp/box.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <utility>

#include "transport/error.h"
#include "transport/tcp/socket.h"
#include "transport/wire.h"

namespace phub {
namespace {

// A lack of descriptors is better reported before the worker gets its offer.
void check_descriptors(int any, uint32_t needed, uint32_t rank) {
  std::vector<Fd> tried;
  while (tried.size() < needed) {
    tried.emplace_back(fcntl(any, F_DUPFD_CLOEXEC, 0));
    if (tried.back()) continue;
    fail_system(fmt::format("{} connections of rank {}", needed, rank), errno);
  }
}

// How far a rank's gradients may be ahead of those of a rank that is behind.
constexpr uint64_t kLeadBytes = 2 << 20;

uint32_t lead_chunks(const LinkLayout& layout) {
  const uint64_t chunks =
      std::accumulate(layout.queue_chunks.begin(), layout.queue_chunks.end(), uint64_t{0});
  return static_cast<uint32_t>(std::clamp<uint64_t>(
      kLeadBytes * chunks / std::max<uint64_t>(layout.slots_bytes, 1), 1, kMaxChunksPerQueue));
}

}  // namespace

void TcpCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  link_.attach(rank, incarnation);
  for (uint32_t q = 0; q < queues_; ++q) {
    list({q, rank});
    connection_announced({q, rank});  // if it is there already
  }
}

void TcpCoreEndpoint::connection_announced(QueuePair pair) {
  TcpQueuePair connected = link_.queue_pair(pair.rank, first_queue_ + pair.queue);
  connected.window = window_;
  if (connected.stream.socket >= 0) open(pair, connected);
}

void TcpCoreEndpoint::detach(uint32_t rank) {
  for (uint32_t q = 0; q < queues_; ++q) close({q, rank});
  link_.detach(rank);
}

TcpBoxLink::TcpBoxLink(Admissions& admissions, const std::vector<TcpNic>& nics,
                       const std::string& near, bool tls, std::shared_ptr<const BoxMemory> memory,
                       const LinkLayout& layout)
    : AdmissionLink(admissions, checked(layout, "tcp").max_ranks),
      nics_(nics),
      near_(near),
      tls_(tls),
      layout_(layout),
      queues_(static_cast<uint32_t>(layout.queue_chunks.size())),
      memory_(std::move(memory)) {
  if (queues_ > kTcpMaxQueues) {
    fail(ErrorCode::kInvalid, "tcp job: {} queues, at most {} are possible", queues_,
         kTcpMaxQueues);
  }
  const uint32_t lead = lead_chunks(layout_);
  uint32_t queue = 0;
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    const uint32_t first = queue;
    while (queue < queues_ && layout_.core_of(queue) == core) ++queue;
    endpoints_.push_back(std::make_unique<TcpCoreEndpoint>(*this, first, queue - first, layout_));
    if (layout_.max_ranks > 1 && layout_.in_step) endpoints_.back()->keep_in_step(lead);
  }
}

BoxEndpoint& TcpBoxLink::endpoint(uint32_t core) {
  PHUB_CHECK(core < endpoints_.size());
  return *endpoints_[core];
}

std::unique_ptr<Incarnation> TcpBoxLink::make(uint32_t rank) {
  check_descriptors(admissions_.epoll.get(), queues_, rank);
  return std::make_unique<TcpIncarnation>();
}

// A queue's NIC is that of the plan. Where it has none, neighbouring queues of a rank, and equal
// queues of neighbouring ranks, get different ones.
size_t TcpBoxLink::nic_of(uint32_t rank, uint32_t queue) const {
  if (!layout_.queue_nic.empty()) {
    const auto is_named = [&](const TcpNic& nic) {
      return nic.front() == layout_.queue_nic[queue];
    };
    const auto named = std::ranges::find_if(nics_, is_named);
    if (named != nics_.end()) return static_cast<size_t>(named - nics_.begin());
  }
  return (size_t{rank} * queues_ + queue) % nics_.size();
}

QueueOffer TcpBoxLink::offer_of(uint32_t rank, uint32_t queue) const {
  QueueOffer offer = {.near = near_};
  if (nics_.empty()) return offer;  // near only
  const size_t chosen = nic_of(rank, queue);
  offer.address = nics_[chosen].front();
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    std::vector<std::string>& list = nic == chosen ? offer.same_nic : offer.other_nics;
    for (const std::string& address : nics_[nic]) {
      if (address != offer.address && list.size() < kMaxOfferedAddresses) list.push_back(address);
    }
  }
  return offer;
}

Offer TcpBoxLink::open(Incarnation& opened) {
  auto& incarnation = static_cast<TcpIncarnation&>(opened);
  Offer offer = {.transport = "tcp", .tls = tls_};
  std::vector<TcpConnection> queues(queues_);
  for (uint32_t q = 0; q < queues_; ++q) {
    queues[q].ring.resize(tcp_ring_entries(layout_.queue_chunks[q]));
    offer.queues.push_back(offer_of(incarnation.rank, q));
  }
  incarnation.queues = std::move(queues);
  return offer;
}

std::span<const std::byte> TcpBoxLink::slots(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && current(rank) != nullptr);
  return memory_->slots(rank);
}

// Closing a socket removes it from both epolls: nobody else has it open. The slots stay.
void TcpBoxLink::disconnect(Incarnation& incarnation) {
  static_cast<TcpIncarnation&>(incarnation).queues.clear();
}

// Unmapping takes long.
BoxLink::HeldMemory TcpBoxLink::memory_of(Incarnation& incarnation) {
  return std::shared_ptr<void>(std::move(static_cast<TcpIncarnation&>(incarnation).near));
}

TcpQueuePair TcpBoxLink::queue_pair(uint32_t rank, uint32_t queue) const {
  auto& incarnation = static_cast<TcpIncarnation&>(attached(rank));
  TcpConnection& connection = incarnation.queues[queue];
  if (!connection.handed_over.load(std::memory_order_acquire)) return {};
  return {.stream = {connection.socket.get(), connection.tls.get(),
                     connection.near ? &incarnation.near->memory() : nullptr, connection.local},
          .ring = connection.ring,
          .source = memory_->results(),
          .target = memory_->slots(rank)};
}

void TcpBoxLink::welcome(TcpIncarnation& incarnation, const TcpHello& hello, Fd& socket,
                         std::unique_ptr<TcpTls>& tls, std::span<const Fd> descriptors) {
  check_tcp_hello(hello, layout_);
  const uint32_t queue = hello.queue - layout_.first_queue;
  TcpConnection& connection = incarnation.queues[queue];
  if (connection.socket) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already for queue {}; join again",
         incarnation.rank, hello.queue);
  }
  const bool near = is_near(socket.get());
  if (near && !incarnation.near) {
    incarnation.near = std::make_unique<TcpNearMemory>(descriptors, layout_.gradients_at_worker(),
                                                       layout_.results_at_worker());
  }
  if (!near) tune(socket.get());
  const bool local = !near && is_local(socket.get());
  if (local) {
    tune_for_this_machine(socket.get());
  } else if (!near) {
    tune_for_a_network(socket.get());
    if (layout_.in_step) limit_window(socket.get());
  }
  TcpCoreEndpoint& core = *endpoints_[layout_.core_of(queue)];
  const QueuePair pair = core.pair_of(incarnation.rank, queue);
  core.watch(socket.get(), pair);
  // The socket stays open until revoke() or reconnect(), which the cores come before.
  admissions_.adopt(incarnation, socket.get(), EPOLLRDHUP);
  TcpWelcome answer;
  answer.rank = incarnation.rank;
  answer.incarnation = incarnation.incarnation;
  const auto bytes = std::as_bytes(std::span(&answer, 1));
  const int error = tls ? send_greeting(*tls, bytes) : send_greeting(socket.get(), bytes);
  if (error != 0) fail_system(fmt::format("answering rank {}", incarnation.rank), error);

  connection.socket = std::move(socket);
  connection.tls = std::move(tls);
  connection.near = near;
  connection.local = local;
  connection.handed_over.store(true, std::memory_order_release);
  core.announce(connection.socket.get(), pair);
}

}  // namespace phub
