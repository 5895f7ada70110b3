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
#include <string_view>
#include <vector>

#include "transport/box_memory.h"
#include "transport/nic.h"
#include "transport/verbs_devices.h"
#include "transport/verbs_endpoint.h"
#include "transport/verbs_format.h"
#include "transport/verbs_resources.h"

namespace phub {

class VerbsBoxLink;

// A port and the listening connection on it.
struct VerbsListener {
  VerbsPort port;
  VerbsId id;
  std::string address;  // "10.0.0.1:18515"
  // Why its device is not used any more; empty: it is. Written by the control thread.
  std::string failure;
};

// What the NIC and its links share. Control thread only.
struct VerbsRegistry {
  VerbsEventChannel events;
  std::vector<VerbsListener> listeners;
  std::mutex failures;  // of the listeners, which links that are made look at on other threads
  std::vector<VerbsBoxLink*> links;  // from their first rank on
  uint32_t most_cqe = 0;             // 0: as the devices say
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

struct VerbsIncarnation {
  uint32_t incarnation = 0;
  std::string ticket;
  std::vector<VerbsMr> slots;                                 // by device of the link
  std::vector<std::unique_ptr<VerbsConnection>> connections;  // by queue; null: not yet
  uint32_t established = 0;
  bool said_connected = false;
  bool said_disconnected = false;
};

// How many cores have attached each rank.
using VerbsAttached = std::vector<std::atomic<uint32_t>>;

// The endpoint of a core: lane q is that of its queue q.
class VerbsCoreEndpoint final : public VerbsEndpoint {
 public:
  VerbsCoreEndpoint(uint32_t max_ranks, std::vector<VerbsLane*> lanes, VerbsAttached& attached);
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

  // Control thread: a queue pair to be used once its rank is attached; null: no more (the rank is
  // not attached then).
  void hand_over(uint32_t qp, VerbsPair* pair);

 private:
  void on_ring() override;
  void take(uint32_t qp);

  const uint32_t max_ranks_;
  const uint32_t queues_;
  std::vector<bool> attached_;  // by rank
  VerbsAttached& all_attached_;
  std::vector<std::atomic<VerbsPair*>> handed_over_;  // by queue pair
};

class VerbsBoxLink final : public BoxLink {
 public:
  VerbsBoxLink(VerbsRegistry& registry, const LinkLayout& layout);
  ~VerbsBoxLink() override;

  std::span<std::byte> egress() override { return memory_.egress(); }
  Endpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  void prepare(uint32_t rank) override;
  Offer admit(uint32_t rank, uint32_t incarnation) override;
  std::span<const std::byte> ingress(uint32_t rank) override { return memory_.slots(rank); }
  Rest revoke(uint32_t rank) override;
  void close() override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override;

  // For the NIC. The rank that the ticket belongs to; -1: none. The time that it takes does not
  // depend on the ticket's digits.
  int find_ticket(std::string_view ticket) const;
  // Accepts a request with this rank's ticket. Throws Error when it is refused. With
  // `id->context` set the link has taken it over all the same: it is broken(), and not the
  // caller's to destroy.
  void accept(uint32_t rank, const VerbsHello& hello, rdma_cm_id* id);
  void established(VerbsConnection& connection, std::vector<NicEvent>& out);
  // The queue pair is at its end, or must be: its core is told, and once the control thread.
  void broken(VerbsConnection& connection, std::vector<NicEvent>& out);
  // A device, or a completion or receive queue: what ends the whole job when it fails.
  bool uses(const ibv_context* device) const;
  bool owns(const ibv_cq* cq) const;
  bool owns(const ibv_srq* srq) const;
  void failed(const std::string& reason, std::vector<NicEvent>& out);
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
  Offer make_offer(uint32_t rank, VerbsIncarnation& made);
  void list();  // in the registry, before a rank is kept: what throws leaves no rank behind
  void end_connections(uint32_t rank);
  uint32_t qp_of(const VerbsConnection& connection) const;

  VerbsRegistry& registry_;
  const LinkLayout layout_;
  BoxMemory memory_;
  std::vector<Device> devices_;
  std::vector<Queue> queues_;
  VerbsAttached attached_;  // by rank
  std::vector<std::unique_ptr<VerbsCoreEndpoint>> endpoints_;
  std::vector<std::unique_ptr<VerbsIncarnation>> incarnations_;  // by rank
  std::vector<std::vector<VerbsMr>> prepared_;                   // by rank: slots, for admit()
  std::vector<Leaving> leaving_;
  bool said_failed_ = false;
  bool listed_ = false;  // in the registry
};

// The device is used no more, and the jobs that use it end.
void device_failed(ibv_context* context, const char* what, VerbsRegistry& registry,
                   std::vector<NicEvent>& out);

// Takes the events of a device that are waiting: marks last receives, reports what broke.
void handle_async_events(ibv_context* context, VerbsRegistry& registry, std::vector<NicEvent>& out);

}  // namespace phub
