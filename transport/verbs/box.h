// The box's side of one job over RDMA. Memory, protection domains, completion queues and shared
// receive queues belong to the job; a registration of the rank's slots and the queue pairs, to an
// incarnation.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/box_memory.h"
#include "transport/transport.h"
#include "transport/verbs/devices.h"
#include "transport/verbs/endpoint.h"
#include "transport/verbs/format.h"
#include "transport/verbs/resources.h"

namespace phub {

class VerbsBoxLink;

// A port and the listening connection on it.
struct VerbsListener {
  VerbsPort port;
  VerbsId id;
  std::string address;  // "10.0.0.1:18515"
  // The reason why its device is not used any more; empty: it is. Written by the control thread.
  std::string failure;
};

// The state that the NIC and its links share. Control thread only.
struct VerbsRegistry {
  VerbsEventChannel events;
  std::vector<VerbsListener> listeners;
  std::mutex failures;    // guards the listeners' failures, which new links read on other threads
  Admissions admissions;  // its links are VerbsBoxLinks
  uint32_t most_cqe = 0;  // 0: as the devices say
};

// A queue pair of an incarnation, from the request to connect it to its end.
struct VerbsConnection {
  VerbsBoxLink* link = nullptr;
  uint32_t rank = 0;
  uint32_t queue = 0;
  VerbsPair pair;
  VerbsId id;
  bool ended = false;
  bool leaving = false;       // revoked: nothing that happens to it matters any more
  bool last_receive = false;  // the device said that no more receives will complete
};

struct VerbsIncarnation final : Incarnation {
  std::vector<VerbsMr> slots;                                 // by device of the link
  std::vector<std::unique_ptr<VerbsConnection>> connections;  // by queue; null: not yet
};

// The endpoint of a core: lane q is that of its queue q.
class VerbsCoreEndpoint final : public VerbsEndpoint, public BoxEndpoint {
 public:
  // `cores`: of the job.
  VerbsCoreEndpoint(AdmissionLink& link, std::vector<VerbsLane*> lanes, uint32_t cores);
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  // Control thread: a queue pair to be used once its rank is attached; null: no more (the rank is
  // not attached then).
  void hand_over(QueuePair name, VerbsPair* pair);

 private:
  void on_ring() override;
  void take(QueuePair name);

  AdmissionLink& link_;
  const uint32_t queues_;
  std::vector<bool> attached_;                        // by rank
  std::vector<std::atomic<VerbsPair*>> handed_over_;  // by index_of()
};

class VerbsBoxLink final : public AdmissionLink {
 public:
  VerbsBoxLink(VerbsRegistry& registry, std::shared_ptr<const BoxMemory> memory,
               const LinkLayout& layout);
  ~VerbsBoxLink() override;

  std::span<std::byte> results() override { return memory_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  void prepare(uint32_t rank) override;
  std::span<const std::byte> slots(uint32_t rank) override { return memory_->slots(rank); }
  void close() override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override { return open_again(rank); }

  // The transport calls these. Accepts a request that showed the incarnation's ticket. Throws Error
  // when it is refused. With `id->context` set the link has taken it over all the same: it is
  // broken(), and not the caller's to destroy.
  void accept(VerbsIncarnation& incarnation, const VerbsHello& hello, rdma_cm_id* id);
  // The queue pair is at its end, or must be: its core is told, and once the control thread.
  void broken(VerbsConnection& connection, std::vector<TransportEvent>& out);
  // A device, or a completion or receive queue: its failure ends the whole job.
  bool uses(const ibv_context* device) const;
  bool owns(const ibv_cq* cq) const;
  bool owns(const ibv_srq* srq) const;
  void failed(const std::string& reason, std::vector<TransportEvent>& out);
  // Destroys revoked queue pairs that have seen their last receive.
  void let_go();

  const VerbsEndpoint& core_endpoint(uint32_t core) const { return *endpoints_[core]; }

 private:
  struct Device {
    const VerbsListener* listener = nullptr;
    VerbsPd pd;
    VerbsMr results;
  };
  struct Leaving {
    std::unique_ptr<VerbsConnection> connection;
    std::chrono::steady_clock::time_point until;
  };
  struct Queue {
    uint32_t device = 0;  // into devices_
    uint32_t core = 0;
    uint32_t in_core = 0;
    std::unique_ptr<VerbsLane> lane;
  };

  void find_devices();
  void make_lanes();
  std::unique_ptr<Incarnation> make(uint32_t rank) override;
  Offer open(Incarnation& incarnation) override;
  void disconnect(Incarnation& incarnation) override;
  HeldMemory memory_of(Incarnation& incarnation) override;
  QueuePair pair_of(const VerbsConnection& connection) const;

  VerbsRegistry& registry_;
  const LinkLayout layout_;
  const std::shared_ptr<const BoxMemory> memory_;
  std::vector<Device> devices_;
  std::vector<Queue> queues_;
  std::vector<std::unique_ptr<VerbsCoreEndpoint>> endpoints_;
  std::vector<std::vector<VerbsMr>> prepared_;  // by rank: slots, for admit()
  std::vector<Leaving> leaving_;
  bool said_failed_ = false;
};

std::vector<VerbsBoxLink*> links_of(const VerbsRegistry& registry);

// The device is used no more, and the jobs that use it end.
void device_failed(ibv_context* context, const char* what, VerbsRegistry& registry,
                   std::vector<TransportEvent>& out);

// Takes the events of a device that are waiting: marks last receives, reports failures.
void handle_async_events(ibv_context* context, VerbsRegistry& registry,
                         std::vector<TransportEvent>& out);

}  // namespace phub
