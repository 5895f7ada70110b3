// The one contract that every transport (verbs, shm, tcp, sim) implements.
//
//   box                                                   worker
//   Nic ── open_job() ──▶ BoxLink (one per job)           connect(offer) ──▶ WorkerLink
//                          ├─ egress(): results                ├─ gradients(), results()
//                          ├─ ingress(): slots of a rank        └─ endpoint()
//                          └─ endpoint(core)
//
// An Endpoint is what one thread owns of a job: a completion queue and the queue pairs attached to
// it. Writes posted to a queue pair arrive in order; the payload of a write has landed before its
// immediate is seen. A queue pair that breaks says so once, as an arrival, and then stays silent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/wire.h"

namespace phub {

struct Arrival {
  static constexpr uint64_t kNotTold = ~uint64_t{0};  // by a transport that does not know

  uint32_t qp = 0;  // index of the queue pair within the endpoint
  uint32_t imm = 0;
  bool ok = true;              // false: the queue pair is broken
  bool violation = false;      // then: by its peer, which sent what no peer sends
  uint64_t bytes = kNotTold;   // of the payload
  uint64_t offset = kNotTold;  // where it lies in the receiver's memory

  bool fits(uint64_t expected_bytes, uint64_t expected_offset) const {
    return (bytes == kNotTold || bytes == expected_bytes) &&
           (offset == kNotTold || bytes == 0 || offset == expected_offset);
  }
};

// A write with 32 bits of immediate data. Offsets are into the registered memory of either side.
// A transport whose peer reads this memory directly (shm) moves only the immediate.
struct Write {
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint32_t bytes = 0;
  uint32_t imm = 0;
};

// What an endpoint did so far; a transport counts what it has.
struct EndpointCounters {
  uint64_t sends = 0, receives = 0;  // writes posted, arrivals
  uint64_t doorbells = 0;            // calls that hand over a batch of requests, either way
  uint64_t polls = 0;                // of completion queues or sockets that found something
  uint64_t empty_polls = 0;
  uint64_t system_calls = 0;  // of ours, sleeping left out
  uint64_t wakeups = 0;       // of sleeping peers

  EndpointCounters& operator+=(const EndpointCounters& other) {
    sends += other.sends, receives += other.receives, doorbells += other.doorbells;
    polls += other.polls, empty_polls += other.empty_polls;
    system_calls += other.system_calls, wakeups += other.wakeups;
    return *this;
  }
  friend bool operator==(const EndpointCounters&, const EndpointCounters&) = default;
};

// Owned by one thread. Nothing here allocates or locks; only flush() and arm() may make system
// calls (flush: at most one wake-up per sleeping peer). What a socket or a NIC's driver needs comes
// on top of that.
//
// poll, post, flush, arm and attach throw Error when the endpoint can go on no more, because its
// device or its driver failed: this is the end of what it was made for, a job at the box. disarm
// and detach never throw.
//
// Queue pairs at the box: qp == q * max_ranks + rank, q being the queue among those of this core
// (layout order). At the worker: qp == queue.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // Takes up to out.size() arrivals, round-robin over the queue pairs.
  virtual size_t poll(std::span<Arrival> out) = 0;

  // Queues a write. False: no room now (poll, then try again) or the queue pair is not connected.
  virtual bool post(uint32_t qp, const Write& write) = 0;

  // Rings the doorbells of everything posted since the last flush.
  virtual void flush() = 0;

  // Before the thread sleeps on wake_fd(): asks to be woken. wake_after[qp] is the number of
  // arrivals on that queue pair to wait for before waking (0: do not wake for it); an empty span
  // means 1 for all. A transport may wake earlier. False: something is there to be polled already.
  virtual bool arm(std::span<const uint32_t> wake_after) = 0;
  virtual void disarm() = 0;

  // Readable (edge triggered: epoll with EPOLLET, never read) when an armed endpoint has work.
  virtual int wake_fd() const = 0;

  virtual EndpointCounters counters() const { return {}; }

  // Called on the box by the owning thread, as asked for through its mailbox: starts and stops
  // listening to the queue pairs of a rank's incarnation. After detach() returns, nothing that the
  // incarnation writes can arrive any more.
  virtual void attach(uint32_t rank, uint32_t incarnation) = 0;
  virtual void detach(uint32_t rank) = 0;
};

// Elements [first, first + count) of a job's arrays on the box are handled by cores of this node.
struct NodeRun {
  uint32_t os_node = 0;
  uint64_t first = 0;
  uint64_t count = 0;
};

// The sizes of a job's memory and queues, as both sides of a link compute them (layout.h).
struct LinkLayout {
  uint32_t max_ranks = 0;
  uint32_t cores = 0;                  // endpoints on the box
  std::vector<uint32_t> queue_chunks;  // chunks of each queue
  std::vector<uint32_t> queue_core;    // core of each queue, ascending; empty: queue q is core q's
  std::vector<std::string> queue_nic;  // Nic::ports() of each queue; empty: the NIC has none
  uint64_t ingress_bytes = 0;          // at the box: the slots of one rank
  uint64_t egress_bytes = 0;           // at the box: the results, one copy
  uint64_t worker_ingress_bytes = 0;   // at the worker: its gradients; 0: as at the box
  uint64_t worker_egress_bytes = 0;    // at the worker: its results; 0: as at the box
  uint32_t egress_copies = 1;          // 1, or one for each rank
  uint32_t egress_copy = 0;            // at the worker: which one is its own
  std::vector<uint32_t> core_node;     // NUMA node of each core
  uint32_t gradient_bytes = 4;         // per element
  uint32_t result_bytes = 4;
  std::vector<NodeRun> runs;  // the box's memory, ascending; empty: one node

  uint64_t all_egress_bytes() const { return egress_bytes * egress_copies; }
  uint64_t gradients_at_worker() const {
    return worker_ingress_bytes == 0 ? ingress_bytes : worker_ingress_bytes;
  }
  uint64_t results_at_worker() const {
    return worker_egress_bytes == 0 ? egress_bytes : worker_egress_bytes;
  }
  uint32_t core_of(uint32_t queue) const { return queue_core.empty() ? queue : queue_core[queue]; }
};

// Asks for the pages of an array, not yet touched and in a mapping of its own, on the nodes of
// `runs`.
void place(std::span<const std::byte> array, size_t element_bytes, std::span<const NodeRun> runs);

// The same for every copy of the results.
void place_results(std::span<const std::byte> results, const LinkLayout& layout);

// What a worker needs to connect; travels in the control connection's answer.
struct QueueOffer {
  std::string address;  // "10.0.0.1:7718"
  uint64_t base = 0;    // verbs: where the rank's slots begin, and their remote key on this NIC
  uint32_t key = 0;

  friend bool operator==(const QueueOffer&, const QueueOffer&) = default;
};
struct Offer {
  std::string transport;           // "shm", "tcp", "verbs", "sim"
  std::string address;             // shm: path of the Unix socket
  std::string ticket;              // 32 hex digits, for this rank and incarnation only
  std::vector<QueueOffer> queues;  // tcp, verbs: where to connect each queue pair
};

// The box's side of one job on one transport. Made on any thread: its NIC knows it from the first
// admission on, until close().
class BoxLink {
 public:
  virtual ~BoxLink() = default;

  // Results (parameters, or sums) in the job's layout, copy after copy; written by the cores, read
  // by the workers.
  virtual std::span<std::byte> egress() = 0;

  // The endpoint of a core.
  virtual Endpoint& endpoint(uint32_t core) = 0;

  // Before admit(), on any thread but the cores': what takes long of it (registering memory). Once
  // for each admit(). Throws Error.
  virtual void prepare(uint32_t /*rank*/) {}
  // Control thread. Makes the memory and queue pairs of a new incarnation of `rank` and a ticket
  // for it. Throws Error when memory or descriptors run out. The cores attach() it afterwards; the
  // offer goes to the worker once all of them have.
  virtual Offer admit(uint32_t rank, uint32_t incarnation) = 0;

  // The gradient slots of the rank's current incarnation. Valid from admit() to revoke(). Where
  // slots do not belong to the worker they are the same memory for every incarnation of a rank: a
  // contribution that was accepted outlives its sender.
  virtual std::span<const std::byte> ingress(uint32_t rank) = 0;

  // What a rank had, and takes long to give back: memory that is unmapped or deregistered when this
  // goes. Any thread but the cores'; before the link goes, and before the next prepare() of the
  // rank.
  using Rest = std::shared_ptr<void>;
  // Control thread, after every core has detached it: closes the connection. Returns what is left
  // of the rank; null: nothing. The worker sees the end of its connection no sooner than this.
  virtual Rest revoke(uint32_t rank) = 0;

  // Control thread, after the last rank was revoked: the NIC knows the link no more, and any thread
  // may destroy it.
  virtual void close() {}

  // Whether an accepted contribution of a fenced rank can still be changed by it (shm: the slot is
  // the worker's own memory). Such contributions are dropped with the fence unless summed already.
  virtual bool slots_belong_to_worker() const = 0;

  // A broken connection of a living incarnation can be made again: same memory, new queue pairs.
  // Control thread, after every core has detached the rank; they attach() it again before the offer
  // goes to the worker.
  virtual bool can_reconnect() const { return false; }
  virtual Offer reconnect(uint32_t rank);
};

struct NicPort {
  std::string name;  // "mlx5_0", "mlx5_0:2" (its second port)
  uint32_t os_node = 0;
};

struct NicEvent {
  // kFailed: of the whole link, whose device is gone; its job ends. kRefused: of nobody known.
  enum Kind { kConnected, kDisconnected, kFailed, kRefused } kind;
  BoxLink* link = nullptr;  // kRefused: none
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string reason = {};  // kFailed, kRefused
};

// A transport on the box. Control thread only, but for open_job(), name() and shares_memory().
class Nic {
 public:
  virtual ~Nic() = default;
  virtual std::string_view name() const = 0;
  virtual std::string describe() const = 0;  // a line or more for people

  // The NICs that a plan gives queues to. Empty: one queue per core.
  virtual std::vector<NicPort> ports() const { return {}; }
  virtual bool shares_memory() const { return false; }  // the slots are the worker's memory
  virtual std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) = 0;
  virtual int event_fd() const = 0;  // readable: call handle_events(); -1: none
  // Never blocks. Also gives up on half-open connections.
  virtual void handle_events(std::vector<NicEvent>& out) = 0;
};

// The worker's side. Lives as long as the incarnation. endpoint() has one queue pair per queue of
// the plan (qp == queue).
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;
  virtual std::span<std::byte> gradients() = 0;      // what push() sends from
  virtual std::span<const std::byte> results() = 0;  // where write-backs land
  virtual Endpoint& endpoint() = 0;
  // False once the box closed the connection or died. Any thread, never blocks.
  virtual bool connected() = 0;
  // Whether results() is the box's own memory (shm) or a copy of this worker's.
  virtual bool zero_copy() const = 0;
  // Whether bytes move only while somebody polls (tcp): then computation overlaps with the exchange
  // only if a thread does nothing else.
  virtual bool needs_polling() const { return false; }
  virtual std::string describe() const { return ""; }  // for people: over what, from which memory
  // New queue pairs onto the same memory, after one broke. Called by whoever polls the endpoint.
  // What was posted and not answered is unknown and must be sent again. Throws Error when this
  // transport cannot.
  virtual void reconnect(const Offer& offer);
  virtual bool can_reconnect() const { return false; }
};

}  // namespace phub
