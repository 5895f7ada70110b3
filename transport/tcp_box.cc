#include "transport/tcp_box.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "transport/error.h"
#include "transport/ticket.h"

namespace phub {
namespace {

// Better to say so before the worker is told to come.
void check_descriptors(int any, uint32_t needed, uint32_t rank) {
  std::vector<TcpFd> tried;
  while (tried.size() < needed) {
    tried.emplace_back(fcntl(any, F_DUPFD_CLOEXEC, 0));
    if (tried.back()) continue;
    fail_system(fmt::format("{} connections of rank {}", needed, rank), errno);
  }
}

}  // namespace

TcpCoreEndpoint::TcpCoreEndpoint(const TcpBoxLink& link, uint32_t first_queue, uint32_t queues,
                                 uint32_t max_ranks)
    : TcpEndpoint(queues * max_ranks),
      link_(link),
      first_queue_(first_queue),
      queues_(queues),
      max_ranks_(max_ranks),
      attached_(max_ranks) {}

void TcpCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  TcpIncarnation* present = link_.present(rank);
  PHUB_CHECK(present != nullptr && present->incarnation == incarnation);
  PHUB_CHECK(attached_[rank] == nullptr);
  attached_[rank] = present;
  present->attached.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t q = 0; q < queues_; ++q) {
    list(q * max_ranks_ + rank);
    connection_announced(q * max_ranks_ + rank);  // unless it is still to come
  }
}

void TcpCoreEndpoint::connection_announced(uint32_t qp) {
  const TcpQueuePair connected = link_.queue_pair(qp % max_ranks_, first_queue_ + qp / max_ranks_);
  if (connected.socket >= 0) open(qp, connected);
}

void TcpCoreEndpoint::detach(uint32_t rank) {
  PHUB_CHECK(rank < max_ranks_ && attached_[rank] != nullptr);
  for (uint32_t q = 0; q < queues_; ++q) close(q * max_ranks_ + rank);
  // Everything that this core did with the connections is before what revoke() does to them.
  std::exchange(attached_[rank], nullptr)->attached.fetch_sub(1, std::memory_order_release);
}

TcpBoxLink::TcpBoxLink(TcpRegistry& registry, const LinkLayout& layout)
    : registry_(registry),
      layout_(layout),
      queues_(static_cast<uint32_t>(layout.queue_chunks.size())),
      memory_(layout, "tcp"),
      incarnations_(layout.max_ranks),
      present_(layout.max_ranks),
      handed_over_(size_t{layout.max_ranks} * queues_) {
  if (queues_ > kTcpMaxQueues) {
    fail(ErrorCode::kInvalid, "tcp job: {} queues, at most {} are possible", queues_,
         kTcpMaxQueues);
  }
  uint32_t queue = 0;
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    const uint32_t first = queue;
    while (queue < queues_ && layout_.core_of(queue) == core) ++queue;
    endpoints_.push_back(
        std::make_unique<TcpCoreEndpoint>(*this, first, queue - first, layout_.max_ranks));
  }
}

TcpBoxLink::~TcpBoxLink() {
  for (uint32_t rank = 0; rank < layout_.max_ranks; ++rank) {
    if (incarnations_[rank] != nullptr) revoke(rank);
  }
  close();
}

void TcpBoxLink::close() {
  if (std::exchange(listed_, false)) std::erase(registry_.links, this);
}

Endpoint& TcpBoxLink::endpoint(uint32_t core) {
  PHUB_CHECK(core < endpoints_.size());
  return *endpoints_[core];
}

Offer TcpBoxLink::admit(uint32_t rank, uint32_t incarnation) {
  if (rank >= layout_.max_ranks) {
    fail(ErrorCode::kInvalid, "rank {}: this job has memory for {} ranks", rank, layout_.max_ranks);
  }
  PHUB_CHECK(incarnations_[rank] == nullptr);
  check_descriptors(registry_.epoll.get(), queues_, rank);
  auto made = std::make_unique<TcpIncarnation>();
  made->rank = rank;
  made->incarnation = incarnation;
  Offer offer = make_connections(*made);
  list();
  present_[rank].store(made.get(), std::memory_order_release);
  incarnations_[rank] = std::move(made);
  return offer;
}

void TcpBoxLink::list() {
  if (!listed_) registry_.links.push_back(this);
  listed_ = true;
}

// Neighbouring queues of a rank, and equal queues of neighbouring ranks, get different addresses.
Offer TcpBoxLink::make_connections(TcpIncarnation& made) {
  Offer offer = {.transport = "tcp", .ticket = make_ticket()};
  std::vector<TcpConnection> connections(queues_);
  for (uint32_t q = 0; q < queues_; ++q) {
    connections[q].ring.resize(tcp_ring_entries(layout_.queue_chunks[q]));
    const size_t at = (size_t{made.rank} * queues_ + q) % registry_.addresses.size();
    offer.queues.push_back({.address = registry_.addresses[at]});
  }
  made.connections = std::move(connections);
  made.ticket = offer.ticket;
  made.connected = 0;
  made.ended = false;
  return offer;
}

std::span<const std::byte> TcpBoxLink::ingress(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && incarnations_[rank] != nullptr);
  return memory_.slots(rank);
}

BoxLink::Rest TcpBoxLink::revoke(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && incarnations_[rank] != nullptr);
  close_connections(*incarnations_[rank]);
  present_[rank].store(nullptr, std::memory_order_relaxed);
  incarnations_[rank].reset();
  return nullptr;  // the slots stay
}

Offer TcpBoxLink::reconnect(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && incarnations_[rank] != nullptr);
  close_connections(*incarnations_[rank]);
  return make_connections(*incarnations_[rank]);
}

// Closing takes a socket out of both epolls: nobody else has it open.
void TcpBoxLink::close_connections(TcpIncarnation& made) {
  PHUB_CHECK(made.attached.load(std::memory_order_acquire) == 0);
  for (uint32_t q = 0; q < queues_; ++q) {
    handed_over(made.rank, q).store(nullptr, std::memory_order_relaxed);
  }
  made.ticket.clear();
  made.connections.clear();
}

std::atomic<TcpConnection*>& TcpBoxLink::handed_over(uint32_t rank, uint32_t queue) {
  return handed_over_[size_t{rank} * queues_ + queue];
}

TcpIncarnation* TcpBoxLink::present(uint32_t rank) const {
  PHUB_CHECK(rank < present_.size());
  return present_[rank].load(std::memory_order_acquire);
}

TcpQueuePair TcpBoxLink::queue_pair(uint32_t rank, uint32_t queue) const {
  TcpConnection* connection =
      handed_over_[size_t{rank} * queues_ + queue].load(std::memory_order_acquire);
  if (connection == nullptr) return {};
  return {.socket = connection->socket.get(),
          .ring = connection->ring,
          .source = memory_.egress(),
          .target = memory_.slots(rank)};
}

TcpIncarnation* TcpBoxLink::find_ticket(std::string_view ticket) {
  TcpIncarnation* found = nullptr;
  for (const auto& made : incarnations_) {
    if (made != nullptr && same_ticket(made->ticket, ticket)) found = made.get();
  }
  return found;
}

TcpIncarnation* TcpBoxLink::find_connection(uint64_t id) {
  for (const auto& made : incarnations_) {
    if (made == nullptr) continue;
    const auto& all = made->connections;
    const auto is_it = [id](const TcpConnection& c) { return c.socket && c.id == id; };
    if (std::any_of(all.begin(), all.end(), is_it)) return made.get();
  }
  return nullptr;
}

void TcpBoxLink::welcome(TcpIncarnation& made, const TcpHello& hello, uint64_t id, TcpFd& socket) {
  check_tcp_hello(hello, layout_);
  TcpConnection& connection = made.connections[hello.queue];
  if (connection.socket) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already for queue {}; join again",
         made.rank, hello.queue);
  }
  tune(socket.get());
  if (same_host(local_address(socket.get()), peer_address(socket.get())))
    tune_for_this_machine(socket.get());

  TcpCoreEndpoint& core = *endpoints_[layout_.core_of(hello.queue)];
  const uint32_t qp = core.qp_of(made.rank, hello.queue);
  core.watch(socket.get(), qp);
  epoll_event ends = {};  // of a connection that both sides know
  ends.events = EPOLLRDHUP | EPOLLET;
  ends.data.u64 = id;
  if (epoll_ctl(registry_.epoll.get(), EPOLL_CTL_MOD, socket.get(), &ends) != 0) {
    fail_system(fmt::format("epoll_ctl of rank {}", made.rank), errno);
  }
  TcpWelcome answer;
  answer.rank = made.rank;
  answer.incarnation = made.incarnation;
  const int error = send_greeting(socket.get(), std::as_bytes(std::span(&answer, 1)));
  if (error != 0) fail_system(fmt::format("answering rank {}", made.rank), error);

  connection.id = id;
  connection.socket = std::move(socket);
  ++made.connected;
  handed_over(made.rank, hello.queue).store(&connection, std::memory_order_release);
  core.announce(connection.socket.get(), qp);
}

}  // namespace phub
