#include "transport/verbs_box.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/ticket.h"
#include "transport/verbs_format.h"

namespace phub {
namespace {

// How long a device has to say that a queue pair took its last receive. Soft-RoCE never does, nor
// does a device that is gone.
constexpr auto kLastReceive = std::chrono::milliseconds(20);

// Only queue pairs of a box are made with a context.
VerbsConnection* connection_of(const ibv_async_event& event) {
  return static_cast<VerbsConnection*>(event.element.qp->qp_context);
}

}  // namespace

VerbsCoreEndpoint::VerbsCoreEndpoint(uint32_t max_ranks, std::vector<VerbsLane*> lanes,
                                     VerbsAttached& attached)
    : VerbsEndpoint(max_ranks * static_cast<uint32_t>(lanes.size()), lanes),
      max_ranks_(max_ranks),
      queues_(static_cast<uint32_t>(lanes.size())),
      attached_(max_ranks),
      all_attached_(attached),
      handed_over_(size_t{max_ranks} * lanes.size()) {}

void VerbsCoreEndpoint::attach(uint32_t rank, uint32_t) {
  if (!attached_[rank]) all_attached_[rank].fetch_add(1, std::memory_order_release);
  attached_[rank] = true;
  for (uint32_t q = 0; q < queues_; ++q) take(q * max_ranks_ + rank);
}

void VerbsCoreEndpoint::detach(uint32_t rank) {
  if (attached_[rank]) all_attached_[rank].fetch_sub(1, std::memory_order_release);
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
      attached_(layout.max_ranks),
      incarnations_(layout.max_ranks),
      prepared_(layout.max_ranks) {
  find_devices();
  make_lanes();
}

// The devices of the layout's queues; where it names none, all of them in turn.
void VerbsBoxLink::find_devices() {
  std::unique_lock failures(registry_.failures);
  std::vector<const VerbsListener*> alive;
  for (const VerbsListener& listener : registry_.listeners) {
    if (listener.failure.empty()) alive.push_back(&listener);
  }
  if (alive.empty()) {
    fail(ErrorCode::kInternal,
         "no RDMA device of this server works any more ({}): restart it when one does, or use the "
         "transport tcp",
         registry_.listeners.front().failure);
  }
  failures.unlock();
  const size_t queues = layout_.queue_chunks.size();
  std::vector<const VerbsListener*> of_queue(queues);
  for (size_t q = 0; q < queues; ++q) {
    if (layout_.queue_nic.empty()) {
      of_queue[q] = alive[q % alive.size()];
      continue;
    }
    for (const VerbsListener* listener : alive) {
      if (listener->port.name() == layout_.queue_nic[q]) of_queue[q] = listener;
    }
    if (of_queue[q] == nullptr) {
      fail(ErrorCode::kInvalid, "verbs job: queue {} is planned on '{}', which is not listened on",
           q, layout_.queue_nic[q]);
    }
  }
  std::vector<const VerbsListener*> used = of_queue;
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  check_locked_memory(
      verbs_locked_bytes(layout_) * used.size(),
      fmt::format("a job of {} ranks over {} NICs", layout_.max_ranks, used.size()));
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
    endpoints_.push_back(
        std::make_unique<VerbsCoreEndpoint>(layout_.max_ranks, of_core, attached_));
  }
}

VerbsBoxLink::~VerbsBoxLink() {
  for (uint32_t rank = 0; rank < layout_.max_ranks; ++rank) {
    if (incarnations_[rank] != nullptr) revoke(rank);
  }
  close();
  endpoints_.clear();  // before their lanes
}

void VerbsBoxLink::close() {
  leaving_.clear();
  if (std::exchange(listed_, false)) std::erase(registry_.links, this);
}

// The kernel finds and locks every page: many gigabytes take seconds.
void VerbsBoxLink::prepare(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks);
  std::vector<VerbsMr> slots;
  for (const Device& device : devices_) {
    slots.push_back(register_memory(device.pd.get(), memory_.slots(rank),
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  }
  prepared_[rank] = std::move(slots);
}

Offer VerbsBoxLink::admit(uint32_t rank, uint32_t incarnation) {
  if (rank >= layout_.max_ranks) {
    fail(ErrorCode::kInvalid, "rank {}: this job has memory for {} ranks", rank, layout_.max_ranks);
  }
  PHUB_CHECK(incarnations_[rank] == nullptr);
  for (const Device& device : devices_) {  // it may have failed while the job was made
    if (const std::string& failure = device.listener->failure; !failure.empty()) {
      fail(ErrorCode::kInternal, "{}", failure);
    }
  }
  auto made = std::make_unique<VerbsIncarnation>();
  made->incarnation = incarnation;
  if (prepared_[rank].empty()) prepare(rank);
  made->slots = std::exchange(prepared_[rank], {});
  Offer offer = make_offer(rank, *made);
  list();
  incarnations_[rank] = std::move(made);
  return offer;
}

void VerbsBoxLink::list() {
  if (!listed_) registry_.links.push_back(this);
  listed_ = true;
}

// A new ticket, and no connection yet.
Offer VerbsBoxLink::make_offer(uint32_t rank, VerbsIncarnation& made) {
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
  end_connections(rank);
  return make_offer(rank, *incarnations_[rank]);
}

BoxLink::Rest VerbsBoxLink::revoke(uint32_t rank) {
  PHUB_CHECK(incarnations_[rank] != nullptr);
  end_connections(rank);
  Rest slots = std::make_shared<std::vector<VerbsMr>>(std::move(incarnations_[rank]->slots));
  incarnations_[rank].reset();
  return slots;
}

// REQUIRES: every core has detached the rank: its queue pairs are in error and their completions
// taken. A queue pair with a shared receive queue may be destroyed once the device has said that it
// took its last receive: until then, and within a bound, it stays, and does nothing.
void VerbsBoxLink::end_connections(uint32_t rank) {
  VerbsIncarnation& made = *incarnations_[rank];
  const auto until = std::chrono::steady_clock::now() + kLastReceive;
  for (auto& connection : made.connections) {
    if (connection == nullptr) continue;
    endpoints_[queues_[connection->queue].core]->hand_over(qp_of(*connection), nullptr);
    if (!connection->ended) rdma_disconnect(connection->id.get());
    connection->leaving = true;
    leaving_.push_back({std::move(connection), until});
  }
  made.connections.clear();
}

void VerbsBoxLink::let_go() {
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(leaving_, [now](const Leaving& leaving) {
    return leaving.connection->last_receive || now >= leaving.until;
  });
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
  if (attached_[rank].load(std::memory_order_acquire) < layout_.cores) {
    fail(ErrorCode::kUnauthorized, "rank {} is being fenced or replaced: join again", rank);
  }
  // The completion queue has room for one queue pair of each rank.
  std::erase_if(leaving_, [&](const Leaving& leaving) {
    return leaving.connection->rank == rank && leaving.connection->queue == hello.queue;
  });
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
  id->context = connection.get();
  connection->id.reset(id);
  // First its core: what the peer sends right after the answer must find its queue pair.
  endpoints_[queue.core]->hand_over(qp_of(*connection), &pair);
  made.connections[hello.queue] = std::move(connection);
  rdma_conn_param parameters = {};
  parameters.rnr_retry_count = 7;  // for ever
  if (rdma_accept(id, &parameters) != 0) {
    fail_verbs(id->verbs, fmt::format("rdma_accept of rank {}", rank), errno);
  }
  restrict_pair(pair.qp);
}

void VerbsBoxLink::established(VerbsConnection& connection, std::vector<NicEvent>& out) {
  if (connection.leaving) return;
  VerbsIncarnation& made = *incarnations_[connection.rank];
  connection.pair.established.store(true, std::memory_order_release);
  if (++made.established < queues_.size() || made.said_connected) return;
  made.said_connected = true;
  out.push_back({NicEvent::kConnected, this, connection.rank, made.incarnation});
}

void VerbsBoxLink::broken(VerbsConnection& connection, std::vector<NicEvent>& out) {
  if (connection.leaving) return;
  VerbsIncarnation& made = *incarnations_[connection.rank];
  endpoints_[queues_[connection.queue].core]->announce_break(qp_of(connection));
  if (std::exchange(made.said_disconnected, true)) return;
  out.push_back({NicEvent::kDisconnected, this, connection.rank, made.incarnation});
}

bool VerbsBoxLink::uses(const ibv_context* device) const {
  return std::any_of(devices_.begin(), devices_.end(), [device](const Device& used) {
    return used.listener->port.context == device;
  });
}

bool VerbsBoxLink::owns(const ibv_cq* cq) const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [cq](const Queue& queue) { return queue.lane->cq.get() == cq; });
}

bool VerbsBoxLink::owns(const ibv_srq* srq) const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [srq](const Queue& queue) { return queue.lane->srq.get() == srq; });
}

void VerbsBoxLink::failed(const std::string& reason, std::vector<NicEvent>& out) {
  if (std::exchange(said_failed_, true)) return;
  out.push_back({.kind = NicEvent::kFailed, .link = this, .reason = reason});
}

void device_failed(ibv_context* context, const char* what, VerbsRegistry& registry,
                   std::vector<NicEvent>& out) {
  for (VerbsListener& listener : registry.listeners) {
    if (listener.port.context != context || !listener.failure.empty()) continue;
    const std::lock_guard lock(registry.failures);
    listener.failure = fmt::format("RDMA device {} {}", listener.port.device, what);
  }
  for (VerbsBoxLink* link : registry.links) {
    if (!link->uses(context)) continue;
    link->failed(
        fmt::format("RDMA device {} {}; a new job uses the others", device_name(context), what),
        out);
  }
}

void handle_async_events(ibv_context* context, VerbsRegistry& registry,
                         std::vector<NicEvent>& out) {
  const auto queue_failed = [&](const auto* queue, const char* what) {
    for (VerbsBoxLink* link : registry.links) {
      if (!link->owns(queue)) continue;
      link->failed(fmt::format("its {} queue on RDMA device {} failed", what, device_name(context)),
                   out);
    }
  };
  ibv_async_event event = {};
  while (ibv_get_async_event(context, &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_QP_LAST_WQE_REACHED:
        if (auto* connection = connection_of(event)) connection->last_receive = true;
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
        if (auto* connection = connection_of(event)) connection->link->broken(*connection, out);
        break;
      case IBV_EVENT_CQ_ERR:
        queue_failed(event.element.cq, "completion");
        break;
      case IBV_EVENT_SRQ_ERR:
        queue_failed(event.element.srq, "receive");
        break;
      case IBV_EVENT_DEVICE_FATAL:
        device_failed(context, "failed", registry, out);
        break;
      default:
        break;
    }
    ibv_ack_async_event(&event);
  }
}

}  // namespace phub
