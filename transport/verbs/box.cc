#include "transport/verbs/box.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/verbs/format.h"

namespace phub {
namespace {

// How long to wait for a device to report the last receive of a queue pair. Soft-RoCE never does,
// nor does a device that is gone.
constexpr auto kLastReceive = std::chrono::milliseconds(20);

// Only queue pairs of a box are made with a context.
VerbsConnection* connection_of(const ibv_async_event& event) {
  return static_cast<VerbsConnection*>(event.element.qp->qp_context);
}

}  // namespace

VerbsCoreEndpoint::VerbsCoreEndpoint(AdmissionLink& link, std::vector<VerbsLane*> lanes,
                                     uint32_t cores)
    : VerbsEndpoint(static_cast<uint32_t>(lanes.size()), link.max_ranks(), lanes, cores),
      link_(link),
      queues_(static_cast<uint32_t>(lanes.size())),
      attached_(link.max_ranks()),
      handed_over_(size_t{link.max_ranks()} * lanes.size()) {}

void VerbsCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  link_.attach(rank, incarnation);
  attached_[rank] = true;
  for (uint32_t q = 0; q < queues_; ++q) take({q, rank});
}

void VerbsCoreEndpoint::detach(uint32_t rank) {
  attached_[rank] = false;
  for (uint32_t q = 0; q < queues_; ++q) close({q, rank});
  link_.detach(rank);
}

void VerbsCoreEndpoint::hand_over(QueuePair name, VerbsPair* pair) {
  handed_over_[index_of(name)].store(pair, std::memory_order_release);
  if (pair == nullptr) return forget_break(name);
  ring();
}

void VerbsCoreEndpoint::on_ring() {
  for (uint32_t rank = 0; rank < attached_.size(); ++rank) {
    if (!attached_[rank]) continue;
    for (uint32_t q = 0; q < queues_; ++q) take({q, rank});
  }
}

void VerbsCoreEndpoint::take(QueuePair name) {
  if (is_open(name)) return;
  auto& handed_over = handed_over_[index_of(name)];
  if (VerbsPair* pair = handed_over.exchange(nullptr, std::memory_order_acquire)) {
    open(name, *pair);
  }
}

VerbsBoxLink::VerbsBoxLink(VerbsRegistry& registry, std::shared_ptr<const BoxMemory> memory,
                           const LinkLayout& layout)
    : AdmissionLink(registry.admissions, checked(layout, "verbs").max_ranks),
      registry_(registry),
      layout_(layout),
      memory_(std::move(memory)),
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
    device.results = register_memory(device.pd.get(), memory_->results(), 0);
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
    endpoints_.push_back(std::make_unique<VerbsCoreEndpoint>(*this, of_core, layout_.cores));
  }
}

VerbsBoxLink::~VerbsBoxLink() {
  revoke_all();
  close();
  endpoints_.clear();  // before their lanes
}

void VerbsBoxLink::close() {
  leaving_.clear();
  AdmissionLink::close();
}

// The kernel finds and locks every page: many gigabytes take seconds.
void VerbsBoxLink::prepare(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks);
  std::vector<VerbsMr> slots;
  for (const Device& device : devices_) {
    slots.push_back(register_memory(device.pd.get(), memory_->slots(rank),
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  }
  prepared_[rank] = std::move(slots);
}

std::unique_ptr<Incarnation> VerbsBoxLink::make(uint32_t rank) {
  for (const Device& device : devices_) {  // it may have failed while the job was made
    if (const std::string& failure = device.listener->failure; !failure.empty()) {
      fail(ErrorCode::kInternal, "{}", failure);
    }
  }
  auto made = std::make_unique<VerbsIncarnation>();
  if (prepared_[rank].empty()) prepare(rank);
  made->slots = std::exchange(prepared_[rank], {});
  return made;
}

Offer VerbsBoxLink::open(Incarnation& opened) {
  auto& incarnation = static_cast<VerbsIncarnation&>(opened);
  incarnation.connections.clear();
  incarnation.connections.resize(queues_.size());
  Offer offer = {.transport = "verbs"};
  for (const Queue& queue : queues_) {
    offer.queues.push_back({devices_[queue.device].listener->address,
                            reinterpret_cast<uint64_t>(memory_->slots(incarnation.rank).data()),
                            incarnation.slots[queue.device]->rkey});
  }
  return offer;
}

BoxLink::HeldMemory VerbsBoxLink::memory_of(Incarnation& incarnation) {
  return std::make_shared<std::vector<VerbsMr>>(
      std::move(static_cast<VerbsIncarnation&>(incarnation).slots));
}

// Every core has detached the rank: its queue pairs are in error and their completions taken. A
// queue pair with a shared receive queue may be destroyed once the device has reported its last
// receive. Until then, or until kLastReceive is over, it stays and is ignored.
void VerbsBoxLink::disconnect(Incarnation& disconnected) {
  auto& incarnation = static_cast<VerbsIncarnation&>(disconnected);
  const auto until = std::chrono::steady_clock::now() + kLastReceive;
  for (auto& connection : incarnation.connections) {
    if (connection == nullptr) continue;
    endpoints_[queues_[connection->queue].core]->hand_over(pair_of(*connection), nullptr);
    if (!connection->ended) rdma_disconnect(connection->id.get());
    connection->leaving = true;
    leaving_.push_back({std::move(connection), until});
  }
  incarnation.connections.clear();
}

void VerbsBoxLink::let_go() {
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(leaving_, [now](const Leaving& leaving) {
    return leaving.connection->last_receive || now >= leaving.until;
  });
}

QueuePair VerbsBoxLink::pair_of(const VerbsConnection& connection) const {
  return {queues_[connection.queue].in_core, connection.rank};
}

void VerbsBoxLink::accept(VerbsIncarnation& incarnation, const VerbsHello& hello, rdma_cm_id* id) {
  const uint32_t rank = incarnation.rank;
  if (!layout_.has_queue(hello.queue)) {
    fail(ErrorCode::kInvalid, "queue {}: this box has {} of the job's {}, from queue {} on",
         hello.queue, queues_.size(), layout_.queues_in_all(), layout_.first_queue);
  }
  const uint32_t number = hello.queue - layout_.first_queue;
  if (incarnation.connections[number] != nullptr) {
    fail(ErrorCode::kUnauthorized, "rank {} queue {}: this ticket was used already; join again",
         rank, hello.queue);
  }
  if (incarnation.attached.load(std::memory_order_acquire) < layout_.cores) {
    fail(ErrorCode::kUnauthorized, "rank {} is being fenced or replaced: join again", rank);
  }
  // The completion queue has room for one queue pair of each rank.
  std::erase_if(leaving_, [&](const Leaving& leaving) {
    return leaving.connection->rank == rank && leaving.connection->queue == number;
  });
  const Queue& queue = queues_[number];
  const Device& device = devices_[queue.device];
  if (id->verbs != device.listener->port.context) {
    fail(ErrorCode::kInvalid, "queue {} is on {}, the request came in on {}", hello.queue,
         device.listener->port.name(), device_name(id->verbs));
  }
  auto connection = std::make_unique<VerbsConnection>();
  connection->link = this;
  connection->rank = rank;
  connection->queue = number;

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
  pair.local_base = reinterpret_cast<uint64_t>(memory_->results().data());
  pair.remote_key = hello.results_key;
  pair.remote_base = hello.results_base;
  pair.remote_bytes = hello.results_bytes;
  pair.send_depth = queue.lane->depth.sends;

  set_ack_timeout(id);
  id->context = connection.get();
  connection->id.reset(id);
  // The core comes first: what the peer sends right after the answer must find its queue pair.
  endpoints_[queue.core]->hand_over(pair_of(*connection), &pair);
  incarnation.connections[number] = std::move(connection);
  rdma_conn_param parameters = {};
  parameters.rnr_retry_count = 7;  // for ever
  if (rdma_accept(id, &parameters) != 0) {
    fail_verbs(id->verbs, fmt::format("rdma_accept of rank {}", rank), errno);
  }
  restrict_pair(pair.qp);
}

void VerbsBoxLink::broken(VerbsConnection& connection, std::vector<TransportEvent>& out) {
  if (connection.leaving) return;
  endpoints_[queues_[connection.queue].core]->announce_break(pair_of(connection));
  report_end(*current(connection.rank), out);
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

void VerbsBoxLink::failed(const std::string& reason, std::vector<TransportEvent>& out) {
  if (std::exchange(said_failed_, true)) return;
  out.push_back({.kind = TransportEvent::kFailed, .link = this, .reason = reason});
}

std::vector<VerbsBoxLink*> links_of(const VerbsRegistry& registry) {
  std::vector<VerbsBoxLink*> links;
  for (AdmissionLink* link : registry.admissions.links) {
    links.push_back(static_cast<VerbsBoxLink*>(link));
  }
  return links;
}

void device_failed(ibv_context* context, const char* what, VerbsRegistry& registry,
                   std::vector<TransportEvent>& out) {
  for (VerbsListener& listener : registry.listeners) {
    if (listener.port.context != context || !listener.failure.empty()) continue;
    const std::lock_guard lock(registry.failures);
    listener.failure = fmt::format("RDMA device {} {}", listener.port.device, what);
  }
  for (VerbsBoxLink* link : links_of(registry)) {
    if (!link->uses(context)) continue;
    link->failed(
        fmt::format("RDMA device {} {}; a new job uses the others", device_name(context), what),
        out);
  }
}

void handle_async_events(ibv_context* context, VerbsRegistry& registry,
                         std::vector<TransportEvent>& out) {
  const auto queue_failed = [&](const auto* queue, const char* what) {
    for (VerbsBoxLink* link : links_of(registry)) {
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
