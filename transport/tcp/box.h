// The box's side of one job over TCP, and the life of its incarnations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/box_memory.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/format.h"
#include "transport/tcp/transport.h"
#include "transport/transport.h"

namespace phub {

class TcpBoxLink;

// The connection of one queue. Made with the ticket, handed over to its core once the worker has
// shown it. The core borrows it from attach() to detach().
struct TcpConnection {
  Fd socket;                    // outlives `tls`
  std::unique_ptr<TcpTls> tls;  // null: plain
  bool near = false;            // payloads are in the incarnation's memory
  bool local = false;           // the worker is on this host, but not near
  std::vector<Write> ring;
  std::atomic<bool> handed_over = false;
};

// The connections of an incarnation. All of them are new after a reconnection, as the ticket is.
struct TcpIncarnation final : Incarnation {
  std::vector<TcpConnection> queues;    // by queue
  std::unique_ptr<TcpNearMemory> near;  // the worker's, from its first near connection on
};

// The endpoint of a core.
class TcpCoreEndpoint final : public TcpEndpoint, public BoxEndpoint {
 public:
  TcpCoreEndpoint(TcpBoxLink& link, uint32_t first_queue, uint32_t queues, const LinkLayout& layout)
      : TcpEndpoint(queues, layout.max_ranks, layout.cores),
        link_(link),
        first_queue_(first_queue),
        queues_(queues) {}
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;
  void use_window(SlotWindow& window) override { window_ = &window; }

  QueuePair pair_of(uint32_t rank, uint32_t queue) const {  // any thread
    return {queue - first_queue_, rank};
  }

 private:
  void connection_announced(QueuePair pair) override;

  TcpBoxLink& link_;
  const uint32_t first_queue_, queues_;
  SlotWindow* window_ = nullptr;  // null: slots
};

class TcpBoxLink final : public AdmissionLink {
 public:
  // `nics`: where the box listens, and the name under which it does for workers on its host
  // (empty: it does not). `tls`: its connections speak TLS.
  TcpBoxLink(Admissions& admissions, const std::vector<TcpNic>& nics, const std::string& near,
             bool tls, std::shared_ptr<const BoxMemory> memory, const LinkLayout& layout);
  ~TcpBoxLink() override { revoke_all(); }

  std::span<std::byte> results() override { return memory_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override;
  std::span<const std::byte> slots(uint32_t rank) override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override { return open_again(rank); }

  // For a core's endpoint: the parts of an attached rank's queue pair once its connection is there
  // (no socket before).
  TcpQueuePair queue_pair(uint32_t rank, uint32_t queue) const;

  // Answers a worker that said `hello` and hands its connection to the core. Throws Error when it
  // may not have the queue, or cannot: then socket and TLS are as they were, and still the
  // caller's. `descriptors`: of a near worker's memory.
  void welcome(TcpIncarnation& incarnation, const TcpHello& hello, Fd& socket,
               std::unique_ptr<TcpTls>& tls, std::span<const Fd> descriptors);

 private:
  std::unique_ptr<Incarnation> make(uint32_t rank) override;
  Offer open(Incarnation& incarnation) override;
  void disconnect(Incarnation& incarnation) override;
  HeldMemory memory_of(Incarnation& incarnation) override;
  size_t nic_of(uint32_t rank, uint32_t queue) const;
  QueueOffer offer_of(uint32_t rank, uint32_t queue) const;

  const std::vector<TcpNic>& nics_;
  const std::string near_;
  const bool tls_;
  const LinkLayout layout_;
  const uint32_t queues_;
  const std::shared_ptr<const BoxMemory> memory_;
  std::vector<std::unique_ptr<TcpCoreEndpoint>> endpoints_;
};

}  // namespace phub
