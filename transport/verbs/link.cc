#include "transport/verbs/link.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/verbs/devices.h"

namespace phub {
namespace {

constexpr uint32_t kReconnectMs = 1500;

[[noreturn]] void fail_changed(ibv_context* context) {
  fail(ErrorCode::kUnavailable,
       "the route to the server changed to {}, which this worker did not use before; join again",
       device_name(context));
}

}  // namespace

VerbsWorkerLink::VerbsWorkerLink(const Offer& offer, const LinkLayout& layout, uint32_t timeout_ms,
                                 std::unique_ptr<LinkArrays> arrays)
    : layout_(layout), timeout_ms_(timeout_ms), arrays_(std::move(arrays)) {
  check(offer);
  VerbsDialer dialer(offer, timeout_ms);
  dialer.resolve();
  make_devices(dialer);
  for (uint32_t thread = 0; thread < layout_.threads; ++thread) {
    endpoints_.push_back(std::make_unique<VerbsEndpoint>(static_cast<uint32_t>(dialer.queues()), 1,
                                                         lanes_of(thread), layout_.threads));
  }
  connect(dialer, offer);
}

void VerbsWorkerLink::check(const Offer& offer) const {
  check_offer(offer, "verbs", &layout_);
  const bool beside_another = arrays_ && arrays_->are_anothers();
  if (!beside_another) check_addresses(offer);  // else there are queues of the other link's
}

VerbsWorkerLink::~VerbsWorkerLink() {
  disconnect_all();
  for (uint32_t q = 0; q < pairs_.size(); ++q) endpoint_of_queue(q).close({q});
  ids_.clear();
  endpoints_.clear();
  pairs_.clear();
  devices_.clear();  // what is registered there is not any more
}

void VerbsWorkerLink::disconnect_all() {
  for (const VerbsId& id : ids_) {
    if (id) rdma_disconnect(id.get());
  }
}

// What this worker has on each device that one of its queue pairs goes over.
void VerbsWorkerLink::make_devices(const VerbsDialer& dialer) {
  for (size_t q = 0; q < dialer.queues(); ++q) {
    if (!dialer.dials(q)) continue;
    ibv_context* context = dialer.context(q);
    const bool known = std::any_of(devices_.begin(), devices_.end(),
                                   [&](const Device& d) { return d.context == context; });
    if (known) continue;
    devices_.emplace_back();
    devices_.back().context = context;
    devices_.back().os_node = numa_node_of(device_name(context));
  }
  make_arrays();
  for (Device& device : devices_) {
    device.pd.reset(ibv_alloc_pd(device.context));
    if (device.pd == nullptr) fail_verbs(device.context, "ibv_alloc_pd", errno);
    device.gradients = register_array(device, gradients(), 0);
    device.results = register_array(device, writable_results(),
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    for (uint32_t thread = 0; thread < layout_.threads; ++thread) {
      device.lanes.push_back(make_lane(dialer, device, thread));
    }
  }
}

void VerbsWorkerLink::make_arrays() {
  if (arrays_ && !arrays_->in_host_memory()) return;  // the host's limits are not about it
  check_locked_memory(
      (layout_.results_at_worker() + layout_.gradients_at_worker()) * devices_.size(),
      fmt::format("a worker over {} NICs", devices_.size()));
  if (!arrays_) arrays_ = arrays_in(devices_.front().os_node, layout_);
}

VerbsMr VerbsWorkerLink::register_array(const Device& device, std::span<const std::byte> array,
                                        int access) {
  if (arrays_->in_host_memory()) {
    return register_memory(device.pd.get(), array, access);
  }
  return register_dma_buf(device.pd.get(), arrays_->device()->dma_buf(array.data(), array.size()),
                          array, access);
}

std::unique_ptr<VerbsLane> VerbsWorkerLink::make_lane(const VerbsDialer& dialer,
                                                      const Device& device, uint32_t thread) const {
  uint64_t pairs = 0, arrivals = 0;
  uint32_t chunks = 0;
  for (uint32_t q = 0; q < dialer.queues(); ++q) {
    if (!dialer.dials(q) || dialer.context(q) != device.context || layout_.thread_of(q) != thread)
      continue;
    ++pairs;
    // Of each chunk a result, and perhaps that its gradient was taken.
    arrivals += uint64_t{2} * layout_.queue_chunks[q] + 1;
    chunks = std::max(chunks, layout_.queue_chunks[q]);
  }
  if (pairs == 0) return nullptr;
  return std::make_unique<VerbsLane>(device.context, device.pd.get(),
                                     verbs_depth(device.context, pairs, arrivals, chunks, 0));
}

// In the order of the devices.
std::vector<VerbsLane*> VerbsWorkerLink::lanes_of(uint32_t thread) const {
  std::vector<VerbsLane*> lanes;
  for (const Device& device : devices_) {
    if (device.lanes[thread]) lanes.push_back(device.lanes[thread].get());
  }
  return lanes;
}

uint32_t VerbsWorkerLink::device_of(ibv_context* context) const {
  for (uint32_t d = 0; d < devices_.size(); ++d) {
    if (devices_[d].context == context) return d;
  }
  fail_changed(context);
}

void VerbsWorkerLink::connect(VerbsDialer& dialer, const Offer& offer) {
  std::vector<std::unique_ptr<VerbsPair>> pairs;
  for (uint32_t q = 0; q < dialer.queues(); ++q) {
    if (!dialer.dials(q)) {
      pairs.emplace_back();
      continue;
    }
    const uint32_t thread = layout_.thread_of(q);
    Device& device = devices_[device_of(dialer.context(q))];
    VerbsLane* const lane = device.lanes[thread].get();
    if (lane == nullptr) fail_changed(device.context);
    const std::vector<VerbsLane*> lanes = lanes_of(thread);
    ibv_qp_init_attr attributes = {};
    attributes.send_cq = attributes.recv_cq = lane->cq.get();
    attributes.srq = lane->srq.get();
    attributes.cap.max_send_wr = lane->depth.sends;
    attributes.cap.max_send_sge = 1;
    attributes.qp_type = IBV_QPT_RC;
    if (rdma_create_qp(dialer.id(q), device.pd.get(), &attributes) != 0) {
      fail_verbs(device.context, "rdma_create_qp", errno);
    }
    auto pair = std::make_unique<VerbsPair>();
    pair->qp = dialer.id(q)->qp;
    pair->lane = static_cast<uint32_t>(std::ranges::find(lanes, lane) - lanes.begin());
    pair->local_key = device.gradients->lkey;
    pair->local_base = reinterpret_cast<uint64_t>(gradients().data());
    pair->remote_key = offer.queues[q].key;
    pair->remote_base = offer.queues[q].base;
    pair->send_depth = lane->depth.sends;
    pairs.push_back(std::move(pair));
  }
  const auto ticket = ticket_bytes(offer.ticket);
  dialer.connect([&](uint32_t q) {
    VerbsHello hello;
    hello.queue = static_cast<uint16_t>(q);
    hello.ticket = ticket;
    hello.results_base = reinterpret_cast<uint64_t>(writable_results().data());
    hello.results_bytes = writable_results().size();
    hello.results_key = devices_[device_of(dialer.context(q))].results->rkey;
    return hello;
  });
  const std::lock_guard lock(events_mutex_);
  ids_ = dialer.take_ids();
  events_ = dialer.take_channel();
  pairs_ = std::move(pairs);
  for (uint32_t q = 0; q < pairs_.size(); ++q) {
    if (pairs_[q] == nullptr) continue;
    restrict_pair(pairs_[q]->qp);
    pairs_[q]->established.store(true, std::memory_order_relaxed);
    endpoint_of_queue(q).open({q}, *pairs_[q]);
  }
  // A sleeper also learns that the box is gone.
  for (const auto& endpoint : endpoints_) endpoint->watch(events_->fd);
  closed_.store(false, std::memory_order_relaxed);
}

void VerbsWorkerLink::reconnect(const Offer& offer) {
  {
    const std::lock_guard lock(events_mutex_);
    disconnect_all();
    for (uint32_t q = 0; q < pairs_.size(); ++q) endpoint_of_queue(q).close({q});
    ids_.clear();
    pairs_.clear();
    events_.reset();
  }
  check(offer);
  // Short: an attempt that began before the wire was back would wait for its answer in vain.
  VerbsDialer dialer(offer, std::min(timeout_ms_, kReconnectMs));
  dialer.resolve();
  connect(dialer, offer);
}

bool VerbsWorkerLink::connected() {
  if (closed_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(events_mutex_);
  if (events_ == nullptr) return false;
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(events_.get(), &event) == 0) {
    const auto type = event->event;
    const auto at = std::find_if(ids_.begin(), ids_.end(),
                                 [&](const VerbsId& id) { return id.get() == event->id; });
    rdma_ack_cm_event(event);
    if (type != RDMA_CM_EVENT_DISCONNECTED && type != RDMA_CM_EVENT_DEVICE_REMOVAL) continue;
    closed_.store(true, std::memory_order_relaxed);
    if (at == ids_.end()) continue;
    const auto queue = static_cast<uint32_t>(at - ids_.begin());
    endpoint_of_queue(queue).announce_break({queue});
  }
  return !closed_.load(std::memory_order_relaxed);
}

std::string VerbsWorkerLink::describe() const {
  std::string names;
  for (const Device& device : devices_) {
    names += fmt::format("{}{} (NUMA node {})", names.empty() ? "" : ", ",
                         device_name(device.context), device.os_node);
  }
  const auto queues =
      std::ranges::count_if(pairs_, [](const auto& pair) { return pair != nullptr; });
  return fmt::format("{} queue pairs over {}; gradients in {} memory{}", queues, names,
                     arrays_->device() ? "the device's" : "host", fork_problem());
}

std::string VerbsWorkerLink::nic_of(uint32_t queue) const {
  const std::lock_guard lock(events_mutex_);
  return ids_.empty() || !ids_[queue] ? "" : device_name(ids_[queue]->verbs);
}

std::unique_ptr<WorkerLink> connect_verbs(const Offer& offer, const LinkLayout& layout,
                                          uint32_t timeout_ms, std::unique_ptr<LinkArrays> arrays) {
  return std::make_unique<VerbsWorkerLink>(offer, layout, timeout_ms, std::move(arrays));
}

}  // namespace phub
