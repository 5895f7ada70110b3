// The one contract that every transport (verbs, shm, tcp, ofi, sim) implements.
//
//   box                                                 worker
//   Transport ── open_job() ──▶ BoxLink (one per job)   connect_…(offer) ──▶ WorkerLink
//                               ├─ results()            ├─ gradients(), results()
//                               ├─ slots(rank)          └─ endpoint(): Endpoint
//                               └─ endpoint(core): BoxEndpoint
//
// An Endpoint is one thread's part of a job: a completion queue and its queue pairs. A write that
// is posted arrives once, and its payload has landed before its immediate is seen; writes may
// overtake each other. A queue pair that breaks says so once; then nothing of it lands any more.
//
// An incarnation of a rank, from its admission to its end, in this order:
//
//   call                         thread           effect
//   make_…_transport()           control          listens
//   Transport::open_job()        any              memory, and an endpoint for each core
//   BoxLink::prepare()           any but a core   the slow part of admit()
//   BoxLink::admit()             control          memory, queue pairs and a ticket, in an Offer
//   BoxEndpoint::attach()        each core        the core polls the incarnation
//   connect_…(offer)             worker           shows the ticket, and waits for the answer …
//   Transport::handle_events()   control          … that this gives; later reports the end
//   poll, post, flush, arm       owner            the exchange, until the rank is lost or leaves
//   BoxEndpoint::detach()        each core        nothing of the incarnation arrives any more
//   BoxLink::revoke()            control          closes its connections; the ticket is void
//   or BoxLink::reconnect()      control          the same, but it goes on with attach()
//   BoxLink::close()             control          after the last rank; any thread may destroy it
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/wire.h"

namespace phub {

class SlotWindow;  // slot_window.h

// A queue pair of an endpoint.
struct QueuePair {
  uint32_t queue = 0;  // at the box, among the queues of its core; at the worker, of the plan
  uint32_t rank = 0;   // at the box the queue pair's rank; at the worker 0
};

struct Arrival {
  static constexpr uint64_t kNotTold = ~uint64_t{0};  // by a transport that does not know

  uint32_t queue = 0, rank = 0;  // as in QueuePair
  uint32_t imm = 0;
  bool ok = true;              // false: the queue pair is broken
  bool violation = false;      // then the peer broke it: it sent something that no peer sends
  uint64_t bytes = kNotTold;   // size of the payload
  uint64_t offset = kNotTold;  // the place in the receiver's memory

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

// Counts the work of an endpoint so far; a transport counts the parts that it has.
struct EndpointCounters {
  uint64_t sends = 0, receives = 0;  // writes posted, arrivals
  uint64_t doorbells = 0;            // calls that hand over a batch of requests, either way
  uint64_t polls = 0;                // polls of completion queues or sockets that found something
  uint64_t empty_polls = 0;
  uint64_t system_calls = 0;  // our own, without those that sleep
  uint64_t wakeups = 0;       // wake-ups of sleeping peers

  EndpointCounters& operator+=(const EndpointCounters& other) {
    sends += other.sends, receives += other.receives, doorbells += other.doorbells;
    polls += other.polls, empty_polls += other.empty_polls;
    system_calls += other.system_calls, wakeups += other.wakeups;
    return *this;
  }
  friend bool operator==(const EndpointCounters&, const EndpointCounters&) = default;
};

// Owned by one thread. Nothing here allocates or locks; only flush() and arm() may make system
// calls (flush: at most one wake-up per sleeping peer). System calls that a socket or a NIC's
// driver needs come on top of that.
//
// poll, post, flush and arm throw Error when the endpoint's device or driver failed: then it cannot
// be used any more, and at the box its job ends. disarm never throws.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // Takes up to out.size() arrivals, round-robin over the queue pairs.
  virtual size_t poll(std::span<Arrival> out) = 0;

  // Queues a write. False: no room now (poll, then try again) or the queue pair is not connected.
  virtual bool post(QueuePair to, const Write& write) = 0;

  // Rings the doorbells of everything posted since the last flush.
  virtual void flush() = 0;

  // Before the thread sleeps on wake_fd(): asks to be woken. wake_after, by rank at the box and by
  // queue at the worker, is the number of arrivals on a queue pair to wait for (0: do not wake for
  // it); an empty span means 1 for all. A transport may wake earlier. False: there is something to
  // poll already.
  virtual bool arm(std::span<const uint32_t> wake_after) = 0;
  virtual void disarm() = 0;

  // Readable (edge triggered: epoll with EPOLLET, never read) when an armed endpoint has work.
  virtual int wake_fd() const = 0;

  // From now on wake_fd() is readable, too, when this one becomes so: that of another endpoint of
  // the thread. Throws Error: kInvalid, this transport cannot; kFull.
  virtual void wake_for(int fd);

  // Whether a write to this queue pair goes over a NIC: not if the other end maps this side's
  // memory.
  virtual bool crosses_nic(QueuePair /*to*/) const { return true; }

  // After a post was refused, another try is worth while only after this time, or after an arrival.
  // 0 means that the time is not known.
  virtual uint64_t refused_for_ns() const { return 0; }

  virtual EndpointCounters counters() const { return {}; }
};

// The endpoint of one core of the box, which serves the ranks that it has attached.
class BoxEndpoint : public virtual Endpoint {
 public:
  // Starts polling the queue pairs of an admitted incarnation. Throws Error like poll().
  virtual void attach(uint32_t rank, uint32_t incarnation) = 0;
  // Stops. After this nothing that the incarnation writes can arrive any more. It never throws.
  virtual void detach(uint32_t rank) = 0;
  // If the layout is windowed: gradients land in the places of this window, which outlives the
  // endpoint. Before the first attach(). Throws Error(kInvalid): this transport cannot.
  virtual void use_window(SlotWindow& window);
  // The time by which a core waits for late ranks: a simulated network has its own.
  virtual uint64_t now_ns() const;
};

// [first, first + count) of a job's memory on the box, in elements of its arrays or in bytes of a
// rank's slots, are handled by cores of this node.
struct NodeRun {
  uint32_t os_node = 0;
  uint64_t first = 0;
  uint64_t count = 0;
};

// The sizes of a job's memory and queues, as both sides of a link compute them (layout.h).
struct LinkLayout {
  uint32_t max_ranks = 0;
  uint32_t first_rank = 0, end_rank = 0;  // the box has slots of these only; both 0: of all
  uint32_t cores = 0;                     // endpoints on the box
  std::vector<uint32_t> queue_chunks;     // chunks of each queue
  std::vector<uint32_t> queue_core;  // core of each queue, ascending; empty: queue q is core q's
  // At a worker whose queues are polled by several threads: how many, and which one's each is;
  // empty: by one.
  uint32_t threads = 1;
  std::vector<uint32_t> queue_thread;
  std::vector<uint32_t> thread_cpu = {};  // and the CPU of each thread; empty: as counted here
  std::vector<std::string> queue_nic;  // Transport::ports() of each queue; empty: the NIC has none
  // At a box that has a part of the job's queues: the number of all queues, and the number that
  // workers know its first one by. all_queues 0: those above are all.
  uint32_t all_queues = 0;
  uint32_t first_queue = 0;
  uint64_t slots_bytes = 0;             // at the box: the slots of one rank
  bool windowed = false;                // at the box: its endpoints use windows in their place
  bool in_step = true;                  // at the box: there is no quorum; who is far ahead waits
  uint64_t results_bytes = 0;           // at the box: the results, one copy
  uint64_t worker_gradients_bytes = 0;  // at the worker: its gradients; 0: as at the box
  uint64_t worker_results_bytes = 0;    // at the worker: its results; 0: as at the box
  uint32_t result_copies = 1;           // 1, or one for each rank
  uint32_t result_copy = 0;             // at the worker: which one is its own
  std::vector<uint32_t> core_node;      // NUMA node of each core
  std::vector<uint32_t> core_cpu = {};  // at the box: which of its threads; empty: as counted here
  uint32_t result_bytes = 4;            // per element
  uint32_t difference_bytes = 0;        // the same, behind the results: of their differences
  // The box's memory, ascending; empty: one node.
  std::vector<NodeRun> runs;       // nodes of the results, in elements
  std::vector<NodeRun> slot_runs;  // nodes of a rank's slots, in bytes

  uint32_t ranks_end() const { return end_rank == 0 ? max_ranks : end_rank; }
  size_t queues_in_all() const { return all_queues == 0 ? queue_chunks.size() : all_queues; }
  // This box has the queue that workers know by this number.
  bool has_queue(uint32_t number) const {
    return number >= first_queue && number - first_queue < queue_chunks.size();
  }
  uint64_t all_results_bytes() const { return results_bytes * result_copies; }
  uint64_t gradients_at_worker() const {
    return worker_gradients_bytes == 0 ? slots_bytes : worker_gradients_bytes;
  }
  uint64_t results_at_worker() const {
    return worker_results_bytes == 0 ? results_bytes : worker_results_bytes;
  }
  uint32_t thread_of(uint32_t queue) const {
    return queue_thread.empty() ? 0 : queue_thread[queue];
  }
  uint32_t core_of(uint32_t queue) const { return queue_core.empty() ? queue : queue_core[queue]; }
};

// Asks for the pages of an array, not yet touched and in a mapping of its own, on the nodes of
// `runs`.
void place(std::span<const std::byte> array, size_t element_bytes, std::span<const NodeRun> runs);

// Does the same for every copy of the results.
void place_results(std::span<const std::byte> results, const LinkLayout& layout);

inline constexpr size_t kMaxOfferedAddresses = 256;  // in each list of a QueueOffer

// The addresses that a worker needs to connect; they travel in the control connection's answer.
struct QueueOffer {
  std::string address;  // "10.0.0.1:7718"
  uint64_t base = 0;    // verbs: where the rank's slots begin, and their remote key on this NIC
  uint32_t key = 0;
  std::string provider = {};  // ofi: libfabric's provider, which both sides use
  // Transports other than shm: a second address for a worker on the box's host, to exchange over
  // memory; empty: there is none.
  std::string near = {};
  // tcp: further addresses of the same NIC, and those of the box's other NICs, for workers that do
  // not reach the first.
  std::vector<std::string> same_nic = {}, other_nics = {};

  friend bool operator==(const QueueOffer&, const QueueOffer&) = default;
};
struct Offer {
  std::string transport;           // "shm", "tcp", "verbs", "ofi", "sim"
  std::string address;             // shm: path of the Unix socket
  std::string ticket;              // 32 hex digits, for this rank and incarnation only
  std::vector<QueueOffer> queues;  // not shm: the places to connect each queue pair
  bool tls = false;                // tcp: its connections speak TLS
};

class BoxMemory;  // box_memory.h

// The box's side of one job on one transport. Made on any thread: its NIC knows it from the first
// admission on, until close().
class BoxLink {
 public:
  virtual ~BoxLink() = default;

  // Results (parameters, or sums) in the job's layout, copy after copy; written by the cores, read
  // by the workers.
  virtual std::span<std::byte> results() = 0;

  // The endpoint of a core.
  virtual BoxEndpoint& endpoint(uint32_t core) = 0;

  // Does the slow part of admit() (registering memory). REQUIRES: called once before each admit(),
  // on any thread but the cores'. Throws Error.
  virtual void prepare(uint32_t /*rank*/) {}
  // Control thread. Makes the memory and queue pairs of a new incarnation of `rank` and a ticket
  // for it. Throws Error when memory or descriptors run out. The cores attach() it afterwards; the
  // offer goes to the worker once all of them have.
  virtual Offer admit(uint32_t rank, uint32_t incarnation) = 0;

  // The next admit() or reconnect() gives out this ticket, as another box that has a part of the
  // job did.
  virtual void use_ticket(std::string ticket) = 0;

  // The gradient slots of the rank's current incarnation; none if the layout is windowed. Valid
  // from admit() to revoke(). If slots
  // do not belong to the worker they are the same memory for every incarnation of a rank: a
  // contribution that was accepted outlives its sender.
  virtual std::span<const std::byte> slots(uint32_t rank) = 0;

  // Resources of a rank that take long to give back: memory that is unmapped or deregistered when
  // this goes. Any thread but the cores'; before the link goes, and before the next prepare() of
  // the rank.
  using HeldMemory = std::shared_ptr<void>;
  // Control thread, after every core has detached it: closes the connection. Returns the memory of
  // the rank, null if there is none. The worker sees the end of its connection no sooner than this.
  virtual HeldMemory revoke(uint32_t rank) = 0;

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
  static constexpr uint32_t kEveryNode = ~uint32_t{0};  // cores of any node may use it alike

  std::string name;  // "mlx5_0", "mlx5_0:2" (its second port); tcp: an address
  uint32_t os_node = 0;
};

// How the box needs less memory for a rank's gradients than a slot for each chunk.
enum class Windows : uint8_t {
  kNone,    // not at all
  kPlaces,  // a gradient gets a place before it is read (slot_window.h); workers do not know of it
  kShared,  // chunks share slots, and a worker sends a gradient once its slot is free (layout.h)
};

struct TransportEvent {
  // kFailed: of the whole link, whose device is gone; its job ends. kRefused: of no incarnation.
  enum Kind { kDisconnected, kFailed, kRefused } kind;
  BoxLink* link = nullptr;  // kRefused: none
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string reason = {};  // kFailed, kRefused
};

// A transport on the box. Control thread only, but for open_job(), name() and shares_memory().
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual std::string describe() const = 0;  // a line or more for people

  // The NICs that a plan gives queues to. Empty: one queue per core.
  virtual std::vector<NicPort> ports() const { return {}; }
  virtual bool shares_memory() const { return false; }  // the slots are the worker's memory
  virtual Windows windows() const { return Windows::kNone; }
  virtual uint64_t nic_bytes_per_s() const { return 0; }  // limit of each NIC; 0: none
  virtual std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) = 0;
  // The same, with the results and slots in memory that the job has over another transport, too.
  // Throws Error(kInvalid): this one cannot.
  virtual std::unique_ptr<BoxLink> open_job_in(std::shared_ptr<const BoxMemory> memory,
                                               const LinkLayout& layout);
  virtual int event_fd() const = 0;  // readable: call handle_events(); -1: none
  // It never blocks. It also gives up on half-open connections.
  virtual void handle_events(std::vector<TransportEvent>& out) = 0;
};

struct InPlace;  // in_place.h

// The worker's side. Lives as long as the incarnation. endpoint() has one queue pair per queue of
// the plan.
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;
  virtual std::span<std::byte> gradients() = 0;      // push() sends these
  virtual std::span<const std::byte> results() = 0;  // write-backs land here
  // The memory of results(), for differences to be added to it. Empty if that is the box's memory.
  virtual std::span<std::byte> writable_results() { return {}; }
  // Copies to gradients(), from byte `offset` on. Both arrays may be memory of a device, which the
  // host does not reach (link_arrays.h).
  virtual void write_gradients(uint64_t offset, std::span<const std::byte> bytes);
  // Ranges of the two arrays that lie in memory of the application's instead, which the transport
  // reads and writes in place; null: this transport cannot. All calls return the same.
  virtual InPlace* in_place() { return nullptr; }
  virtual Endpoint& endpoint() = 0;
  // The endpoint of a thread, if the layout says that there are several (queue_thread). Each names
  // queues as the plan does, and has its own.
  virtual Endpoint& endpoint_of(uint32_t thread);
  // False once the box closed the connection or died. Any thread, never blocks.
  virtual bool connected() = 0;
  // Whether results() is the box's own memory (shm) or a copy of this worker's.
  virtual bool zero_copy() const = 0;
  // Whether bytes move only while somebody polls (tcp): then computation overlaps with the exchange
  // only if a thread does nothing else.
  virtual bool needs_polling() const { return false; }
  virtual std::string describe() const { return ""; }  // for people: the network and the memory
  // The NIC of this host that sends writes to the queue; the same text for all queues if that is
  // not known, and "" if it crosses none. May change with reconnect().
  virtual std::string nic_of(uint32_t /*queue*/) const { return ""; }
  // New queue pairs onto the same memory, after one broke. REQUIRES: the thread that polls the
  // endpoint calls it. Writes that were posted and not answered may be lost and must be sent again.
  // Throws Error when this transport cannot.
  virtual void reconnect(const Offer& offer);
  virtual bool can_reconnect() const { return false; }
  // Gives up the ports of this host that another link of this rank may need. REQUIRES: the thread
  // that polls the endpoint calls it, and polls no more.
  virtual void give_up_ports() {}
};

}  // namespace phub
