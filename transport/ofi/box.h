// The box's side of one job over libfabric, and the life of its incarnations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/box_memory.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/format.h"
#include "transport/ofi/pair.h"
#include "transport/transport.h"

namespace phub {

class OfiBoxLink;

// The provider and the addresses at which the transport listens.
struct OfiPlaces {
  std::string provider;
  std::vector<std::string> hosts;      // "10.0.0.1"
  std::vector<std::string> addresses;  // the same with ports: "10.0.0.1:7718"
};

// The connection of one queue. Made with the ticket, handed over to its core once the worker has
// shown it. The core borrows it from attach() to detach(), which closes the pair.
struct OfiConnection {
  Fd socket;
  std::unique_ptr<OfiPair> pair;
  std::atomic<bool> handed_over = false;
};

// All connections are new after a reconnection, as the ticket is.
struct OfiIncarnation final : Incarnation {
  std::vector<OfiConnection> queues;  // by queue
};

// The endpoint of a core.
class OfiCoreEndpoint final : public OfiEndpoint, public BoxEndpoint {
 public:
  OfiCoreEndpoint(OfiBoxLink& link, uint32_t first_queue, uint32_t queues, const LinkLayout& layout)
      : OfiEndpoint(queues, layout.max_ranks, layout.cores),
        link_(link),
        first_queue_(first_queue),
        queues_(queues) {}
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  QueuePair pair_of(uint32_t rank, uint32_t queue) const {  // any thread
    return {queue - first_queue_, rank};
  }

 private:
  void connection_announced(QueuePair pair) override;

  OfiBoxLink& link_;
  const uint32_t first_queue_, queues_;
};

class OfiBoxLink final : public AdmissionLink {
 public:
  // `places` outlives it.
  OfiBoxLink(Admissions& admissions, const OfiPlaces& places,
             std::shared_ptr<const BoxMemory> memory, const LinkLayout& layout);
  ~OfiBoxLink() override { revoke_all(); }

  std::span<std::byte> results() override { return memory_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override;
  std::span<const std::byte> slots(uint32_t rank) override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override { return open_again(rank); }

  // For a core's endpoint, of an attached rank: the parts of a queue pair once its connection is
  // there (no socket before).
  OfiConnected connected(uint32_t rank, uint32_t queue) const;
  // Afterwards nothing arrives over the queue pair any more, connected or not.
  void fence(uint32_t rank, uint32_t queue) const;

  // Answers a worker that said `hello` and hands its connection to the core. Throws Error when it
  // may not have the queue, or cannot: then the socket is still the caller's.
  void welcome(OfiIncarnation& incarnation, const OfiHello& hello, Fd& socket);

 private:
  std::unique_ptr<Incarnation> make(uint32_t rank) override;
  Offer open(Incarnation& incarnation) override;
  void disconnect(Incarnation& incarnation) override;
  size_t place_of(uint32_t rank, uint32_t queue) const {
    return (size_t{rank} * queues_ + queue) % places_.hosts.size();
  }
  void open_domains();

  const OfiPlaces& places_;
  const LinkLayout layout_;
  const uint32_t queues_;
  const std::shared_ptr<const BoxMemory> memory_;
  std::vector<std::vector<std::shared_ptr<const OfiDomain>>> domains_;  // [core][place]
  std::vector<std::unique_ptr<OfiCoreEndpoint>> endpoints_;
};

}  // namespace phub
