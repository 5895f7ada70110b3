// The box's side of one job over TCP, and the life of its incarnations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/box_memory.h"
#include "transport/nic.h"
#include "transport/tcp_endpoint.h"
#include "transport/tcp_format.h"
#include "transport/tcp_socket.h"

namespace phub {

class TcpBoxLink;

// What the NIC and its links share. Control thread only.
struct TcpRegistry {
  std::vector<std::string> addresses;  // "10.0.0.1:7718"
  TcpFd epoll;                         // of the NIC; an event's data is an id
  std::vector<TcpBoxLink*> links;      // from their first rank on
  uint64_t next_id = 1;                // of connections, for the lifetime of the NIC
};

// The connection of one queue. Made with the ticket, usable once its worker has shown it. A core
// borrows it from attach() to detach().
struct TcpConnection {
  uint64_t id = 0;  // in the NIC's epoll, once connected
  TcpFd socket;
  std::vector<Write> ring;
};

// The connections of an incarnation. All of them are new after a reconnection, as the ticket is.
struct TcpIncarnation {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;
  std::vector<TcpConnection> connections;  // by queue
  uint32_t connected = 0;                  // of them
  bool ended = false;                      // one of them, and that was told
  std::atomic<uint32_t> attached = 0;      // cores
};

// The endpoint of a core.
class TcpCoreEndpoint final : public TcpEndpoint {
 public:
  TcpCoreEndpoint(const TcpBoxLink& link, uint32_t first_queue, uint32_t queues,
                  uint32_t max_ranks);
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  uint32_t qp_of(uint32_t rank, uint32_t queue) const {  // any thread
    return (queue - first_queue_) * max_ranks_ + rank;
  }

 private:
  void connection_announced(uint32_t qp) override;

  const TcpBoxLink& link_;
  const uint32_t first_queue_, queues_, max_ranks_;
  std::vector<TcpIncarnation*> attached_;  // by rank
};

class TcpBoxLink final : public BoxLink {
 public:
  TcpBoxLink(TcpRegistry& registry, const LinkLayout& layout);
  ~TcpBoxLink() override;

  std::span<std::byte> egress() override { return memory_.egress(); }
  Endpoint& endpoint(uint32_t core) override;
  Offer admit(uint32_t rank, uint32_t incarnation) override;
  std::span<const std::byte> ingress(uint32_t rank) override;
  Rest revoke(uint32_t rank) override;
  void close() override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override;

  // For the cores' endpoints, any thread: the present incarnation of the rank, and what a queue
  // pair works on once its connection is there (socket -1 before).
  TcpIncarnation* present(uint32_t rank) const;
  TcpQueuePair queue_pair(uint32_t rank, uint32_t queue) const;

  // For the NIC. The incarnation that the ticket, or the connection, belongs to, or nullptr. The
  // time that find_ticket takes does not depend on the ticket's digits.
  TcpIncarnation* find_ticket(std::string_view ticket);
  TcpIncarnation* find_connection(uint64_t id);
  // Answers a worker that said `hello` and hands its connection to the core. Throws Error when it
  // may not have the queue, or cannot: then the socket is as it was, and still the caller's.
  void welcome(TcpIncarnation& incarnation, const TcpHello& hello, uint64_t id, TcpFd& socket);

 private:
  Offer make_connections(TcpIncarnation& made);
  void list();  // in the registry, before a rank is kept: what throws leaves no rank behind
  void close_connections(TcpIncarnation& made);
  std::atomic<TcpConnection*>& handed_over(uint32_t rank, uint32_t queue);

  TcpRegistry& registry_;
  bool listed_ = false;  // in the registry
  const LinkLayout layout_;
  const uint32_t queues_;
  const BoxMemory memory_;
  std::vector<std::unique_ptr<TcpCoreEndpoint>> endpoints_;
  std::vector<std::unique_ptr<TcpIncarnation>> incarnations_;  // by rank
  std::vector<std::atomic<TcpIncarnation*>> present_;          // the same, for the cores
  // By rank and queue: what its core may take, set once per connection.
  std::vector<std::atomic<TcpConnection*>> handed_over_;
};

}  // namespace phub
