// The queue pairs of one thread over RDMA: the hot path of both sides.
//
// A lane is the thread's part of one NIC: a completion queue for everything, a shared receive queue
// whose requests have no buffers (the payload of a write lands where the write says; the receive
// only takes the immediate), and a completion channel to sleep on. Lanes belong to one job, and so
// does everything in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/in_flight.h"
#include "transport/transport.h"
#include "transport/verbs/resources.h"

namespace phub {

// Limits of a lane. Peers cannot exceed any of them: the completion queue holds a completion for
// every receive and every send, so it cannot overrun; the NIC tells senders that find no receive to
// wait (rnr_retry 7).
struct VerbsDepth {
  uint32_t receives = 0;  // in the lane's shared receive queue
  uint32_t sends = 0;     // each queue pair's
  uint32_t completions = 0;
};
// For `pairs` queue pairs that carry `arrivals` at once in all and `chunks` each. `most_cqe`: 0: as
// the device says. Throws Error(kFull) when the device cannot hold that many queue pairs.
VerbsDepth verbs_depth(ibv_context* context, uint64_t pairs, uint64_t arrivals, uint32_t chunks,
                       uint32_t most_cqe);

struct VerbsLane {
  VerbsLane(ibv_context* context, ibv_pd* pd, const VerbsDepth& depth);

  VerbsDepth depth;
  VerbsCompChannel channel;  // declared before the members that refer to it
  VerbsCq cq;
  VerbsSrq srq;
  uint32_t to_repost = 0;
};

// One end of a connection, made by the side that connects and used by the owner of the endpoint.
struct VerbsPair {
  ibv_qp* qp = nullptr;
  uint32_t lane = 0;
  uint32_t local_key = 0;
  uint64_t local_base = 0;
  uint32_t remote_key = 0;
  uint64_t remote_base = 0;
  uint64_t remote_bytes = ~uint64_t{0};
  uint32_t send_depth = 0;
  rdma_cm_id* id = nullptr;  // the box's: it is disconnected when the pair breaks
  std::atomic<bool> established{false};
};

// Shortens the limits that librdmacm leaves too long or too wide in a queue pair that is ready to
// receive. Throws Error(kFull).
void restrict_pair(ibv_qp* qp);
void set_ack_timeout(rdma_cm_id* id);  // before it connects or accepts

class VerbsEndpoint : public virtual Endpoint {
 public:
  // A queue pair for each of `queues` and `ranks` (1 at the worker), none open. `endpoints`: how
  // many there are of this kind, this one included. Throws Error(kFull) when descriptors run out.
  // Lanes outlive the endpoint's use.
  VerbsEndpoint(uint32_t queues, uint32_t ranks, std::vector<VerbsLane*> lanes, uint32_t endpoints);
  ~VerbsEndpoint() override;

  size_t poll(std::span<Arrival> out) final;
  bool post(QueuePair to, const Write& write) final;
  void flush() final;
  bool arm(std::span<const uint32_t> wake_after) final;
  void disarm() final {}
  int wake_fd() const final { return epoll_fd_; }
  void wake_for(int fd) final { watch(fd); }

  void open(QueuePair name, VerbsPair& pair);
  // Nothing of the queue pair arrives any more: it is put into error and its completions are taken
  // out of the completion queue.
  void close(QueuePair name);
  void watch(int fd);  // wakes this endpoint too, edge triggered
  // Any thread: the peer is gone, or the NIC says that the queue pair is; seen by the next poll().
  void announce_break(QueuePair name);
  void forget_break(QueuePair name) {
    announced_[index_of(name)].store(false, std::memory_order_relaxed);
  }
  void ring();  // any thread: wakes the owner

  EndpointCounters counters() const final { return counters_; }

 protected:
  // Called at the beginning of poll() when ring() was called.
  virtual void on_ring() {}
  uint32_t index_of(QueuePair name) const { return name.queue * ranks_ + name.rank; }
  bool is_open(QueuePair name) const { return states_[index_of(name)].pair != nullptr; }

 private:
  static constexpr uint32_t kStaged = 32;
  struct Request {
    ibv_send_wr wr;
    ibv_sge sge;
  };
  enum class Status : uint8_t { kClosed, kLive, kBroken, kSilent };
  struct State {
    QueuePair name;
    VerbsPair* pair = nullptr;
    Status status = Status::kClosed;
    bool dirty = false;
    uint32_t staged = 0;       // requests built since the last doorbell
    uint32_t outstanding = 0;  // requests that may still be in the send queue, staged ones included
    uint32_t unsignaled = 0;   // since the last signaled one
    uint64_t unsignaled_bytes = 0;
    uint64_t outstanding_bytes = 0;
    std::vector<uint32_t> bytes;    // by outstanding request: a ring as long as the send queue
    uint32_t oldest = 0;            // index of the oldest in it
    std::vector<Request> requests;  // prebuilt; the driver copies them at the doorbell
  };
  void build_requests(State& state);
  bool has_room(const State& state) const;
  void doorbell(uint32_t qp);
  void take(uint32_t lane, const ibv_wc& wc);
  void sent(const ibv_wc& wc);
  void break_pair(uint32_t qp);
  size_t poll_lane(uint32_t lane);
  void repost(VerbsLane& lane);
  void drain_channels();
  void close_descriptors();
  void note_failure(const VerbsLane& lane, const char* call, int error);
  void check_alive() const;
  void answer_ring();
  void announced_breaks();

  const uint32_t ranks_;
  std::vector<VerbsLane*> lanes_;
  std::vector<State> states_;  // by index_of()
  std::vector<uint32_t> dirty_;
  InFlight in_flight_;  // counts writes that are posted and not completed
  // A device counts its queue pairs; on another one the same number is another queue pair.
  static uint64_t name_of(uint32_t lane, uint32_t qp_num) { return uint64_t{lane} << 32 | qp_num; }
  std::unordered_map<uint64_t, uint32_t> by_name_;  // changes only while opening and closing
  std::vector<Arrival> pending_;                    // taken from the NIC, not from here yet
  size_t pending_begin_ = 0;
  uint32_t next_lane_ = 0;
  EndpointCounters counters_;
  std::string failure_;                       // that of a device or its driver; empty: none
  std::vector<std::atomic<bool>> announced_;  // by index_of()
  std::atomic<bool> rung_{false};
  int epoll_fd_ = -1;
  int ring_fd_ = -1;
};

}  // namespace phub
