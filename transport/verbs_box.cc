#include "transport/verbs_box.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "transport/error.h"
#include "transport/ticket.h"

namespace phub {
namespace {

constexpr auto kLastReceive = std::chrono::milliseconds(20);
constexpr uint32_t kSoftRoceVendor = 0xffffff;

// Soft-RoCE never says that a queue pair has seen its last receive.
bool says_last_receive(ibv_context* context) {
  ibv_device_attr attributes = {};
  return ibv_query_device(context, &attributes) == 0 && attributes.vendor_id != kSoftRoceVendor;
}

}  // namespace

VerbsCoreEndpoint::VerbsCoreEndpoint(uint32_t max_ranks, std::vector<VerbsLane*> lanes)
    : VerbsEndpoint(max_ranks * static_cast<uint32_t>(lanes.size()), lanes),
      max_ranks_(max_ranks),
      queues_(static_cast<uint32_t>(lanes.size())),
      attached_(max_ranks),
      handed_over_(size_t{max_ranks} * lanes.size()) {}

void VerbsCoreEndpoint::attach(uint32_t rank, uint32_t) {
  attached_[rank] = true;
  for (uint32_t q = 0; q < queues_; ++q) take(q * max_ranks_ + rank);
}

void VerbsCoreEndpoint::detach(uint32_t rank) {
  attached_[rank] = false;
  for (uint32_t q = 0; q < queues_; ++q) close(q * max_ranks_ + rank);
}

void VerbsCoreEndpoint::hand_over(uint32_t qp, VerbsPair* pair) {
  handed_over_[qp].store(pair, std::memory_order_release);
  if (pair == nullptr) return forget_break(qp);
  ring();
}

void VerbsCoreEndpoint::on_ring() {
  for (uint32_t qp = 0; qp < handed_over_.size(); ++qp) {
    if (attached_[qp % max_ranks_]) take(qp);
  }
}

void VerbsCoreEndpoint::take(uint32_t qp) {
  if (is_open(qp)) return;
  if (VerbsPair* pair = handed_over_[qp].exchange(nullptr, std::memory_order_acquire)) {
    open(qp, *pair);
  }
}

VerbsBoxLink::VerbsBoxLink(VerbsRegistry& registry, const LinkLayout& layout)
    : registry_(registry),
      layout_(layout),
      memory_(layout, "verbs"),
      incarnations_(layout.max_ranks) {
  find_devices();
  make_lanes();
  registry_.links.push_back(this);
}

// The devices of the layout's queues; where it names none, all of them in turn.
void VerbsBoxLink::find_devices() {
  const size_t queues = layout_.queue_chunks.size();
  std::vector<const VerbsListener*> of_queue(queues);
  for (size_t q = 0; q < queues; ++q) {
    if (layout_.queue_nic.empty()) {
      of_queue[q] = &registry_.listeners[q % registry_.listeners.size()];
      continue;
    }
    for (const VerbsListener& listener : registry_.listeners) {
      if (listener.port.name() == layout_.queue_nic[q]) of_queue[q] = &listener;
    }
    if (of_queue[q] == nullptr) {
      fail(ErrorCode::kInvalid, "verbs job: queue {} is planned on '{}', which is not listened on",
           q, layout_.queue_nic[q]);
    }
  }
  std::vector<const VerbsListener*> used = of_queue;
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  const uint64_t bytes = layout_.egress_bytes + layout_.max_ranks * layout_.ingress_bytes;
  check_locked_memory(bytes * used.size(), fmt::format("a job of {} ranks over {} NICs",
                                                       layout_.max_ranks, used.size()));
  for (const VerbsListener* listener : used) {
    Device device;
    device.listener = listener;
    device.pd.reset(ibv_alloc_pd(listener->port.context));
    if (device.pd == nullptr) fail_verbs(listener->port.context, "ibv_alloc_pd", errno);
    device.results = register_memory(device.pd.get(), memory_.egress(), 0);
    devices_.push_back(std::move(device));
  }
  for (size_t q = 0; q < queues; ++q) {
    Queue queue;
    queue.device =
        static_cast<uint32_t>(std::find(used.begin(), used.end(), of_queue[q]) - used.begin());
    queue.core = layout_.core_of(static_cast<uint32_t>(q));
    queue.in_core = static_cast<uint32_t>(
        std::count_if(queues_.begin(), queues_.end(),
                      [&](const Queue& other) { return other.core == queue.core; }));
    queues_.push_back(std::move(queue));
  }
}

void VerbsBoxLink::make_lanes() {
  std::vector<std::vector<VerbsLane*>> lanes(layout_.cores);
  for (size_t q = 0; q < queues_.size(); ++q) {
    Queue& queue = queues_[q];
    const Device& device = devices_[queue.device];
    ibv_context* context = device.listener->port.context;
    const uint32_t chunks = layout_.queue_chunks[q];
    const VerbsDepth depth =
        verbs_depth(context, layout_.max_ranks, uint64_t{layout_.max_ranks} * (chunks + 1), chunks,
                    registry_.most_cqe);
    queue.lane = std::make_unique<VerbsLane>(context, device.pd.get(), depth);
    lanes[queue.core].push_back(queue.lane.get());
  }
  for (auto& of_core : lanes) {
    endpoints_.push_back(std::make_unique<VerbsCoreEndpoint>(layout_.max_ranks, of_core));
  }
}

VerbsBoxLink::~VerbsBoxLink() {
  for (uint32_t rank = 0; rank < layout_.max_ranks; ++rank) {
    if (incarnations_[rank] != nullptr) revoke(rank);
  }
  endpoints_.clear();  // before their lanes
  std::erase(registry_.links, this);
}

Offer VerbsBoxLink::admit(uint32_t rank, uint32_t incarnation) {
  if (rank >= layout_.max_ranks) {
    fail(ErrorCode::kInvalid, "rank {}: this job has memory for {} ranks", rank, layout_.max_ranks);
  }
  PHUB_CHECK(incarnations_[rank] == nullptr);
  auto made = std::make_unique<VerbsIncarnation>();
  made->incarnation = incarnation;
  for (const Device& device : devices_) {
    made->slots.push_back(register_memory(device.pd.get(), memory_.slots(rank),
                                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  }
  incarnations_[rank] = std::move(made);
  return make_offer(rank);
}

// A new ticket, and no connection yet.
Offer VerbsBoxLink::make_offer(uint32_t rank) {
  VerbsIncarnation& made = *incarnations_[rank];
  made.ticket = make_ticket();
  made.connections.clear();
  made.connections.resize(queues_.size());
  made.established = 0;
  made.said_connected = made.said_disconnected = false;
  Offer offer = {.transport = "verbs", .ticket = made.ticket};
  for (const Queue& queue : queues_) {
    offer.queues.push_back({devices_[queue.device].listener->address,
                            reinterpret_cast<uint64_t>(memory_.slots(rank).data()),
                            made.slots[queue.device]->rkey});
  }
  return offer;
}

Offer VerbsBoxLink::reconnect(uint32_t rank) {
  PHUB_CHECK(incarnations_[rank] != nullptr);
  destroy_connections(rank);
  return make_offer(rank);
}

void VerbsBoxLink::revoke(uint32_t rank) {
  PHUB_CHECK(incarnations_[rank] != nullptr);
  destroy_connections(rank);
  incarnations_[rank].reset();
}

// REQUIRES: every core has detached the rank: its queue pairs are in error and their completions
// taken.
void VerbsBoxLink::destroy_connections(uint32_t rank) {
  VerbsIncarnation& made = *incarnations_[rank];
  for (const auto& connection : made.connections) {
    if (connection == nullptr) continue;
    endpoints_[queues_[connection->queue].core]->hand_over(qp_of(*connection), nullptr);
    if (!connection->ended) rdma_disconnect(connection->id.get());
  }
  await_last_receives(made);
  made.connections.clear();
}

// A queue pair with a shared receive queue may be destroyed once the device has said that it took
// its last receive. Bounded: a device that is gone says nothing.
void VerbsBoxLink::await_last_receives(const VerbsIncarnation& made) {
  const auto deadline = std::chrono::steady_clock::now() + kLastReceive;
  std::vector<NicEvent> ignored;
  for (const auto& connection : made.connections) {
    if (connection == nullptr || !says_last_receive(connection->id->verbs)) continue;
    while (!connection->last_receive && std::chrono::steady_clock::now() < deadline) {
      handle_async_events(connection->id->verbs, registry_, ignored);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

int VerbsBoxLink::find_ticket(std::string_view ticket) const {
  int found = -1;
  for (uint32_t rank = 0; rank < incarnations_.size(); ++rank) {
    if (incarnations_[rank] != nullptr && same_ticket(incarnations_[rank]->ticket, ticket)) {
      found = static_cast<int>(rank);
    }
  }
  return found;
}

uint32_t VerbsBoxLink::qp_of(const VerbsConnection& connection) const {
  return queues_[connection.queue].in_core * layout_.max_ranks + connection.rank;
}

void VerbsBoxLink::accept(uint32_t rank, const VerbsHello& hello, rdma_cm_id* id) {
  VerbsIncarnation& made = *incarnations_[rank];
  if (hello.queue >= queues_.size()) {
    fail(ErrorCode::kInvalid, "queue {}: this job has {}", hello.queue, queues_.size());
  }
  if (made.connections[hello.queue] != nullptr) {
    fail(ErrorCode::kUnauthorized, "rank {} queue {}: this ticket was used already; join again",
         rank, hello.queue);
  }
  const Queue& queue = queues_[hello.queue];
  const Device& device = devices_[queue.device];
  if (id->verbs != device.listener->port.context) {
    fail(ErrorCode::kInvalid, "queue {} is on {}, the request came in on {}", hello.queue,
         device.listener->port.name(), device_name(id->verbs));
  }
  auto connection = std::make_unique<VerbsConnection>();
  connection->link = this;
  connection->rank = rank;
  connection->queue = hello.queue;

  ibv_qp_init_attr attributes = {};
  attributes.qp_context = connection.get();
  attributes.send_cq = attributes.recv_cq = queue.lane->cq.get();
  attributes.srq = queue.lane->srq.get();
  attributes.cap.max_send_wr = queue.lane->depth.sends;
  attributes.cap.max_send_sge = 1;
  attributes.qp_type = IBV_QPT_RC;
  if (rdma_create_qp(id, device.pd.get(), &attributes) != 0) {
    fail_verbs(id->verbs, fmt::format("rdma_create_qp for rank {}", rank), errno);
  }
  VerbsPair& pair = connection->pair;
  pair.qp = id->qp;
  pair.id = id;
  pair.lane = queue.in_core;
  pair.local_key = device.results->lkey;
  pair.local_base = reinterpret_cast<uint64_t>(memory_.egress().data());
  pair.remote_key = hello.results_key;
  pair.remote_base = hello.results_base;
  pair.remote_bytes = hello.results_bytes;
  pair.send_depth = queue.lane->depth.sends;

  set_ack_timeout(id);
  rdma_conn_param parameters = {};
  parameters.rnr_retry_count = 7;  // for ever
  if (rdma_accept(id, &parameters) != 0) {
    const int error = errno;
    rdma_destroy_qp(id);
    fail_verbs(id->verbs, fmt::format("rdma_accept of rank {}", rank), error);
  }
  try {
    restrict_pair(pair.qp);
  } catch (const Error&) {
    rdma_destroy_qp(id);
    throw;
  }
  id->context = connection.get();
  connection->id.reset(id);  // nothing may throw from here on: the caller destroys what it refuses
  endpoints_[queue.core]->hand_over(qp_of(*connection), &pair);
  made.connections[hello.queue] = std::move(connection);
}

void VerbsBoxLink::established(VerbsConnection& connection, std::vector<NicEvent>& out) {
  VerbsIncarnation& made = *incarnations_[connection.rank];
  connection.pair.established.store(true, std::memory_order_release);
  if (++made.established < queues_.size() || made.said_connected) return;
  made.said_connected = true;
  out.push_back({NicEvent::kConnected, this, connection.rank, made.incarnation});
}

void VerbsBoxLink::broken(VerbsConnection& connection, std::vector<NicEvent>& out) {
  VerbsIncarnation& made = *incarnations_[connection.rank];
  endpoints_[queues_[connection.queue].core]->announce_break(qp_of(connection));
  if (std::exchange(made.said_disconnected, true)) return;
  out.push_back({NicEvent::kDisconnected, this, connection.rank, made.incarnation});
}

bool VerbsBoxLink::owns(const ibv_cq* cq) const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [cq](const Queue& queue) { return queue.lane->cq.get() == cq; });
}

void VerbsBoxLink::broken_completions(const ibv_cq* cq, std::vector<NicEvent>& out) {
  for (const auto& made : incarnations_) {
    if (made == nullptr) continue;
    for (const auto& connection : made->connections) {
      if (connection != nullptr && queues_[connection->queue].lane->cq.get() == cq) {
        broken(*connection, out);
      }
    }
  }
}

void handle_async_events(ibv_context* context, VerbsRegistry& registry,
                         std::vector<NicEvent>& out) {
  ibv_async_event event = {};
  while (ibv_get_async_event(context, &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_QP_LAST_WQE_REACHED:
        static_cast<VerbsConnection*>(event.element.qp->qp_context)->last_receive = true;
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR: {
        // Only queue pairs of a box are made with a context.
        auto* connection = static_cast<VerbsConnection*>(event.element.qp->qp_context);
        if (connection != nullptr) connection->link->broken(*connection, out);
        break;
      }
      case IBV_EVENT_CQ_ERR:
        for (VerbsBoxLink* link : registry.links) {
          if (link->owns(event.element.cq)) link->broken_completions(event.element.cq, out);
        }
        break;
      default:
        break;
    }
    ibv_ack_async_event(&event);
  }
}

}  // namespace phub
