#include "transport/verbs/endpoint.h"

#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace phub {
namespace {

constexpr int kPollBatch = 64;
constexpr uint32_t kMostSends = 1024;
constexpr uint32_t kMostReceives = 16384;
constexpr uint32_t kLeast = 16;
constexpr uint32_t kRepostBatch = 64;
constexpr uint64_t kReceive = ~uint64_t{0};  // wr_id; that of a send: queue pair and requests

uint32_t signal_every(uint32_t depth) { return std::clamp(depth / 4, 1u, 32u); }

// A chain of receives without buffers.
std::array<ibv_recv_wr, kRepostBatch> make_receives() {
  std::array<ibv_recv_wr, kRepostBatch> requests = {};
  for (uint32_t i = 0; i < kRepostBatch; ++i) {
    requests[i].wr_id = kReceive;
    requests[i].next = i + 1 < kRepostBatch ? &requests[i + 1] : nullptr;
  }
  return requests;
}

int post_receives(ibv_srq* srq, uint32_t count) {
  std::array<ibv_recv_wr, kRepostBatch> requests = make_receives();
  for (uint32_t i = 0; i + 1 < count; ++i) requests[i].next = &requests[i + 1];
  requests[count - 1].next = nullptr;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_srq_recv(srq, requests.data(), &bad);
}

}  // namespace

VerbsDepth verbs_depth(ibv_context* context, uint64_t pairs, uint64_t arrivals, uint32_t chunks,
                       uint32_t most_cqe) {
  ibv_device_attr device = {};
  if (const int error = ibv_query_device(context, &device); error != 0) {
    fail_verbs(context, "ibv_query_device", error);
  }
  const uint64_t cqe =
      std::min<uint64_t>(most_cqe == 0 ? ~0u : most_cqe, static_cast<uint64_t>(device.max_cqe));
  const uint64_t least = kLeast * (pairs + 1);
  if (cqe < least || static_cast<uint64_t>(device.max_qp) < pairs) {
    fail(ErrorCode::kFull,
         "{}: {} queue pairs need a completion queue of {} entries and the device has up to {} "
         "(and {} queue pairs): use fewer ranks, or more NICs or cores",
         device_name(context), pairs, least, cqe, device.max_qp);
  }
  VerbsDepth depth;
  depth.receives = static_cast<uint32_t>(
      std::min({std::max<uint64_t>(arrivals, kLeast), cqe / 2, uint64_t{kMostReceives},
                static_cast<uint64_t>(std::max(device.max_srq_wr, 1))}));
  depth.sends = static_cast<uint32_t>(
      std::min({(cqe - depth.receives) / pairs, uint64_t{chunks} + kLeast, uint64_t{kMostSends},
                static_cast<uint64_t>(std::max(device.max_qp_wr, 1))}));
  depth.sends = std::max(depth.sends, 4u);
  depth.completions = static_cast<uint32_t>(depth.receives + depth.sends * pairs);
  return depth;
}

VerbsLane::VerbsLane(ibv_context* context, ibv_pd* pd, const VerbsDepth& wanted) : depth(wanted) {
  channel.reset(ibv_create_comp_channel(context));
  if (channel == nullptr) fail_verbs(context, "ibv_create_comp_channel", errno);
  make_nonblocking(channel->fd);
  const auto entries = static_cast<int>(depth.completions);
  cq.reset(ibv_create_cq(context, entries, nullptr, channel.get(), 0));
  if (cq == nullptr) {
    fail_verbs(context, fmt::format("ibv_create_cq of {} entries", entries), errno);
  }
  ibv_srq_init_attr attributes = {};
  attributes.attr.max_wr = depth.receives;
  attributes.attr.max_sge = 1;
  srq.reset(ibv_create_srq(pd, &attributes));
  if (srq == nullptr) {
    fail_verbs(context, fmt::format("ibv_create_srq of {} receives", depth.receives), errno);
  }
  for (uint32_t posted = 0; posted < depth.receives;) {
    const uint32_t count = std::min(kRepostBatch, depth.receives - posted);
    if (const int error = post_receives(srq.get(), count); error != 0) {
      fail_verbs(context, "ibv_post_srq_recv", error);
    }
    posted += count;
  }
}

VerbsEndpoint::VerbsEndpoint(uint32_t queues, uint32_t ranks, std::vector<VerbsLane*> lanes,
                             uint32_t endpoints)
    : ranks_(ranks),
      lanes_(std::move(lanes)),
      states_(size_t{queues} * ranks),
      in_flight_(kPathBytes, endpoints, queues, ranks),
      announced_(states_.size()) {
  for (uint32_t q = 0; q < queues; ++q) {
    for (uint32_t rank = 0; rank < ranks; ++rank) states_[index_of({q, rank})].name = {q, rank};
  }
  dirty_.reserve(states_.size());
  size_t most = states_.size();
  for (const VerbsLane* lane : lanes_) most += lane->depth.receives + kPollBatch;
  pending_.reserve(most);
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  ring_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  try {
    if (epoll_fd_ < 0 || ring_fd_ < 0) {
      fail(ErrorCode::kFull, "an endpoint's descriptors: {}; raise ulimit -n",
           std::strerror(errno));
    }
    watch(ring_fd_);
    for (const VerbsLane* lane : lanes_) watch(lane->channel->fd);
  } catch (const Error&) {
    close_descriptors();
    throw;
  }
}

VerbsEndpoint::~VerbsEndpoint() {
  drain_channels();
  close_descriptors();
}

void VerbsEndpoint::close_descriptors() {
  for (const int fd : {epoll_fd_, ring_fd_}) {
    if (fd >= 0) ::close(fd);
  }
}

void VerbsEndpoint::watch(int fd) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    fail(ErrorCode::kFull, "epoll_ctl: {}", std::strerror(errno));
  }
}

// A failure is reported by the next poll() or arm(), not where it happens: that may be in detach(),
// which never throws.
void VerbsEndpoint::note_failure(const VerbsLane& lane, const char* call, int error) {
  if (!failure_.empty()) return;
  failure_ = fmt::format("{} on {}: {}", call, device_name(lane.cq->context), std::strerror(error));
}

void VerbsEndpoint::check_alive() const {
  if (!failure_.empty()) throw Error(ErrorCode::kInternal, failure_);
}

size_t VerbsEndpoint::poll(std::span<Arrival> out) {
  check_alive();
  answer_ring();
  for (size_t i = 0; i < lanes_.size() && pending_.size() - pending_begin_ < out.size(); ++i) {
    poll_lane(next_lane_);
    next_lane_ = next_lane_ + 1 == lanes_.size() ? 0 : next_lane_ + 1;
  }
  const size_t count = std::min(out.size(), pending_.size() - pending_begin_);
  std::copy_n(pending_.begin() + static_cast<ptrdiff_t>(pending_begin_), count, out.begin());
  pending_begin_ += count;
  if (pending_begin_ == pending_.size()) pending_.clear(), pending_begin_ = 0;
  return count;
}

// REQUIRES: pending_ has room for a batch: it is polled only while less than a batch is in it, or
// while a queue pair is closed, where the receives of the lane are the limit.
size_t VerbsEndpoint::poll_lane(uint32_t index) {
  VerbsLane& lane = *lanes_[index];
  if (pending_.size() + kPollBatch > pending_.capacity()) return 0;
  std::array<ibv_wc, kPollBatch> completions;
  const int count = ibv_poll_cq(lane.cq.get(), kPollBatch, completions.data());
  ++(count > 0 ? counters_.polls : counters_.empty_polls);
  if (count < 0) note_failure(lane, "ibv_poll_cq", EIO);
  if (count <= 0) return 0;
  for (int i = 0; i < count; ++i) take(index, completions[static_cast<size_t>(i)]);
  const uint32_t batch = std::clamp(lane.depth.receives / 4, 1u, kRepostBatch);
  while (lane.to_repost >= batch) repost(lane);
  return static_cast<size_t>(count);
}

void VerbsEndpoint::take(uint32_t index, const ibv_wc& wc) {
  if (wc.wr_id != kReceive) return sent(wc);
  ++lanes_[index]->to_repost;
  ++counters_.receives;
  const uint64_t name = name_of(index, wc.qp_num);
  auto at = by_name_.find(name);
  if (at == by_name_.end()) {
    // Of a closed queue pair, or of one that was handed over a moment ago: the control thread rings
    // before it accepts.
    answer_ring();
    at = by_name_.find(name);
    if (at == by_name_.end()) return;
  }
  const uint32_t qp = at->second;
  State& state = states_[qp];
  if (state.status != Status::kLive) return;
  if (wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return break_pair(qp);
  state.pair->established.store(true, std::memory_order_relaxed);
  pending_.push_back({.queue = state.name.queue,
                      .rank = state.name.rank,
                      .imm = ntohl(wc.imm_data),
                      .bytes = wc.byte_len});
}

void VerbsEndpoint::sent(const ibv_wc& wc) {
  const auto qp = static_cast<uint32_t>(wc.wr_id >> 32);
  if (qp >= states_.size() || states_[qp].pair == nullptr ||
      states_[qp].pair->qp->qp_num != wc.qp_num) {
    return;  // of a queue pair that is gone
  }
  if (wc.status != IBV_WC_SUCCESS) return break_pair(qp);
  State& state = states_[qp];
  const auto count = static_cast<uint32_t>(wc.wr_id);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < count; ++i) {
    bytes += state.bytes[state.oldest];
    state.oldest = state.oldest + 1 == state.bytes.size() ? 0 : state.oldest + 1;
  }
  state.outstanding -= count;
  state.outstanding_bytes -= bytes;
  in_flight_.gone(state.name.rank, bytes);
}

void VerbsEndpoint::break_pair(uint32_t qp) {
  if (states_[qp].status != Status::kLive) return;
  states_[qp].status = Status::kSilent;
  // Without this a worker that sends nothing would wait for ever for results that cannot come.
  if (states_[qp].pair->id != nullptr) rdma_disconnect(states_[qp].pair->id);
  const QueuePair name = states_[qp].name;
  pending_.push_back({.queue = name.queue, .rank = name.rank, .ok = false});
}

void VerbsEndpoint::repost(VerbsLane& lane) {
  const uint32_t count = std::min(lane.to_repost, kRepostBatch);
  if (const int error = post_receives(lane.srq.get(), count); error != 0) {
    note_failure(lane, "ibv_post_srq_recv", error);
  }
  ++counters_.doorbells;
  lane.to_repost -= count;
}

bool VerbsEndpoint::has_room(const State& state) const {
  return state.outstanding < state.pair->send_depth &&
         in_flight_.has_room(state.name.rank, state.outstanding_bytes);
}

bool VerbsEndpoint::post(QueuePair to, const Write& write) {
  const uint32_t qp = index_of(to);
  PHUB_CHECK(qp < states_.size());
  State& state = states_[qp];
  if (state.status != Status::kLive || !state.pair->established.load(std::memory_order_acquire)) {
    return false;
  }
  const VerbsPair& pair = *state.pair;
  if (!has_room(state)) {
    poll_lane(pair.lane);  // sends may have completed
    if (state.status != Status::kLive) return false;
    if (!has_room(state)) {
      in_flight_.refused();
      return false;
    }
  }
  if (write.bytes > pair.remote_bytes || write.remote_offset > pair.remote_bytes - write.bytes) {
    break_pair(qp);  // the peer announced less memory than the job has
    return false;
  }
  if (state.staged == kStaged) doorbell(qp);
  Request& request = state.requests[state.staged];
  request.sge.addr = pair.local_base + write.local_offset;
  request.sge.length = write.bytes;
  request.wr.num_sge = write.bytes > 0 ? 1 : 0;
  request.wr.imm_data = htonl(write.imm);
  request.wr.wr.rdma.remote_addr = pair.remote_base + write.remote_offset;
  ++state.unsignaled;
  state.unsignaled_bytes += write.bytes;
  const bool signal = state.unsignaled == signal_every(pair.send_depth) ||
                      state.unsignaled_bytes >= in_flight_.bytes_untold();
  request.wr.send_flags = signal ? IBV_SEND_SIGNALED : 0;
  request.wr.wr_id = uint64_t{qp} << 32 | state.unsignaled;
  if (signal) state.unsignaled = 0, state.unsignaled_bytes = 0;
  const size_t newest = size_t{state.oldest} + state.outstanding;
  state.bytes[newest < state.bytes.size() ? newest : newest - state.bytes.size()] = write.bytes;
  ++state.staged;
  ++state.outstanding;
  state.outstanding_bytes += write.bytes;
  in_flight_.posted(to.rank, write.bytes);
  ++counters_.sends;
  if (!state.dirty) dirty_.push_back(qp);
  state.dirty = true;
  return true;
}

// One call for everything that was staged.
void VerbsEndpoint::doorbell(uint32_t qp) {
  State& state = states_[qp];
  if (state.staged == 0 || state.status != Status::kLive) return;
  Request& last = state.requests[state.staged - 1];
  last.wr.next = nullptr;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(state.pair->qp, &state.requests.front().wr, &bad);
  if (state.staged < kStaged) last.wr.next = &state.requests[state.staged].wr;
  state.staged = 0;
  ++counters_.doorbells;
  if (error != 0) break_pair(qp);
}

void VerbsEndpoint::flush() {
  for (const uint32_t qp : dirty_) {
    states_[qp].dirty = false;
    doorbell(qp);
  }
  dirty_.clear();
}

void VerbsEndpoint::answer_ring() {
  if (!rung_.load(std::memory_order_relaxed)) return;
  rung_.exchange(false, std::memory_order_acq_rel);
  on_ring();
  announced_breaks();
}

bool VerbsEndpoint::arm(std::span<const uint32_t>) {
  answer_ring();
  drain_channels();
  for (VerbsLane* lane : lanes_) {
    const int error = ibv_req_notify_cq(lane->cq.get(), 0);
    if (error != 0) note_failure(*lane, "ibv_req_notify_cq", error);
  }
  // Completions from before the request make no notification: all of them are taken now.
  for (uint32_t i = 0; i < lanes_.size(); ++i) {
    while (pending_.empty() && poll_lane(i) > 0) {
    }
  }
  check_alive();
  return !in_flight_.made_room() && pending_.empty() && !rung_.load(std::memory_order_acquire);
}

void VerbsEndpoint::drain_channels() {
  for (VerbsLane* lane : lanes_) {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    while (ibv_get_cq_event(lane->channel.get(), &cq, &context) == 0) ibv_ack_cq_events(cq, 1);
  }
}

// librdmacm leaves the longest time there is, 655 ms, as what a sender waits when it found no
// receive; 0.08 ms is about what the owner of the queue takes to post some. And it allows remote
// reads and atomics to a peer that asks for them.
void restrict_pair(ibv_qp* qp) {
  constexpr uint8_t kRnrTimer80us = 5;
  ibv_qp_attr attributes = {};
  attributes.min_rnr_timer = kRnrTimer80us;
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const int error = ibv_modify_qp(qp, &attributes, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS);
  if (error == 0) return;
  // The peer may have broken it by now, with a request that is refused; the owner learns of that as
  // of any other break.
  ibv_qp_init_attr initial = {};
  if (ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial) == 0 &&
      attributes.qp_state == IBV_QPS_ERR) {
    return;
  }
  fail_verbs(qp->context, "ibv_modify_qp of the RNR timer and the access flags", error);
}

// librdmacm leaves 2 s and more: as long a pause for every last packet that is lost, and a quarter
// of a minute until seven attempts have shown that a path is dead. 4.096 us << 17 is 0.54 s, 3.8 s
// for all of them; then the connection is made again. A kernel before 5.1 keeps its own.
void set_ack_timeout(rdma_cm_id* id) {
  uint8_t exponent = 17;
  rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &exponent, sizeof exponent);
}

void VerbsEndpoint::open(QueuePair name, VerbsPair& pair) {
  const uint32_t qp = index_of(name);
  State& state = states_[qp];
  PHUB_CHECK(state.pair == nullptr && pair.qp != nullptr);
  if (state.requests.empty()) state.requests.resize(kStaged);
  state.pair = &pair;
  state.status = Status::kLive;
  state.staged = state.outstanding = state.unsignaled = state.oldest = 0;
  state.unsignaled_bytes = state.outstanding_bytes = 0;
  state.bytes.assign(pair.send_depth, 0);
  build_requests(state);
  by_name_[name_of(pair.lane, pair.qp->qp_num)] = qp;
  if (announced_[qp].exchange(false, std::memory_order_acquire)) break_pair(qp);
}

// What is the same in every request of a queue pair.
void VerbsEndpoint::build_requests(State& state) {
  for (uint32_t i = 0; i < kStaged; ++i) {
    Request& request = state.requests[i];
    request = {};
    request.sge.lkey = state.pair->local_key;
    request.wr.next = i + 1 < kStaged ? &state.requests[i + 1].wr : nullptr;
    request.wr.sg_list = &request.sge;
    request.wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    request.wr.wr.rdma.rkey = state.pair->remote_key;
  }
}

void VerbsEndpoint::close(QueuePair name) {
  const uint32_t qp = index_of(name);
  State& state = states_[qp];
  if (state.pair == nullptr) return;
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_ERR;
  ibv_modify_qp(state.pair->qp, &attributes, IBV_QP_STATE);
  while (poll_lane(state.pair->lane) > 0) {
  }
  by_name_.erase(name_of(state.pair->lane, state.pair->qp->qp_num));
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<ptrdiff_t>(pending_begin_));
  pending_begin_ = 0;
  std::erase_if(pending_, [name](const Arrival& arrival) {
    return arrival.queue == name.queue && arrival.rank == name.rank;
  });
  if (state.dirty) std::erase(dirty_, qp);
  state.dirty = false;
  in_flight_.gone(name.rank, std::exchange(state.outstanding_bytes, 0));
  state.pair = nullptr;
  state.status = Status::kClosed;
  announced_[qp].store(false, std::memory_order_relaxed);
}

void VerbsEndpoint::announce_break(QueuePair name) {
  announced_[index_of(name)].store(true, std::memory_order_release);
  ring();
}

void VerbsEndpoint::announced_breaks() {
  for (uint32_t qp = 0; qp < states_.size(); ++qp) {
    if (states_[qp].pair != nullptr && announced_[qp].load(std::memory_order_relaxed) &&
        announced_[qp].exchange(false, std::memory_order_acquire)) {
      break_pair(qp);
    }
  }
}

void VerbsEndpoint::ring() {
  rung_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(ring_fd_, &one, sizeof one);
}

}  // namespace phub
