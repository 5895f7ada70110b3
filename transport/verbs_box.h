// The box's side of one job over RDMA. Memory, protection domains, completion queues and shared
// receive queues belong to the job; a registration of the rank's slots and the queue pairs, to an
// incarnation.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
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
};

// What the NIC and its links share. Control thread only.
struct VerbsRegistry {
  VerbsEventChannel events;
  std::vector<VerbsListener> listeners;
  std::vector<VerbsBoxLink*> links;  // alive
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

// The endpoint of a core: lane q is that of its queue q.
class VerbsCoreEndpoint final : public VerbsEndpoint {
 public:
  VerbsCoreEndpoint(uint32_t max_ranks, std::vector<VerbsLane*> lanes);
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
  std::vector<bool> attached_;                        // by rank
  std::vector<std::atomic<VerbsPair*>> handed_over_;  // by queue pair
};

class VerbsBoxLink final : public BoxLink {
 public:
  VerbsBoxLink(VerbsRegistry& registry, const LinkLayout& layout);
  ~VerbsBoxLink() override;

  std::span<std::byte> egress() override { return memory_.egress(); }
  Endpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  Offer admit(uint32_t rank, uint32_t incarnation) override;
  std::span<const std::byte> ingress(uint32_t rank) override { return memory_.slots(rank); }
  void revoke(uint32_t rank) override;
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return true; }
  Offer reconnect(uint32_t rank) override;

  // For the NIC. The rank that the ticket belongs to; -1: none. The time that it takes does not
  // depend on the ticket's digits.
  int find_ticket(std::string_view ticket) const;
  // Accepts a request with this rank's ticket. Throws Error when it is refused.
  void accept(uint32_t rank, const VerbsHello& hello, rdma_cm_id* id);
  void established(VerbsConnection& connection, std::vector<NicEvent>& out);
  // The queue pair is at its end, or must be: its core is told, and once the control thread.
  void broken(VerbsConnection& connection, std::vector<NicEvent>& out);
  bool owns(const ibv_cq* cq) const;
  void broken_completions(const ibv_cq* cq, std::vector<NicEvent>& out);

  const VerbsEndpoint& core_endpoint(uint32_t core) const { return *endpoints_[core]; }

 private:
  struct Device {
    const VerbsListener* listener = nullptr;
    VerbsPd pd;
    VerbsMr results;
  };
  struct Queue {
    uint32_t device = 0;  // into devices_
    uint32_t core = 0;
    uint32_t in_core = 0;
    std::unique_ptr<VerbsLane> lane;
  };

  void find_devices();
  void make_lanes();
  Offer make_offer(uint32_t rank);
  void destroy_connections(uint32_t rank);
  void await_last_receives(const VerbsIncarnation& incarnation);
  uint32_t qp_of(const VerbsConnection& connection) const;

  VerbsRegistry& registry_;
  const LinkLayout layout_;
  BoxMemory memory_;
  std::vector<Device> devices_;
  std::vector<Queue> queues_;
  std::vector<std::unique_ptr<VerbsCoreEndpoint>> endpoints_;
  std::vector<std::unique_ptr<VerbsIncarnation>> incarnations_;  // by rank
};

// Takes the events of a device that are waiting: marks last receives, reports what broke.
void handle_async_events(ibv_context* context, VerbsRegistry& registry, std::vector<NicEvent>& out);

}  // namespace phub
