// The simulated network: one process, one thread, virtual time, everything random from one seed.
//
// It behaves as reliable connections do. The payload of a write arrives before its immediate; queue
// pairs overtake each other, and with `overtake` the writes of one queue pair do, in both
// directions. A lost packet costs a retransmission and a duplicate is filtered; too many losses in
// a row, or a fault that the test asks for, break the queue pair. Then every write in flight has
// arrived, or has landed without its immediate (one of them perhaps by half), or never happened,
// and nobody is told which: both ends only see ok == false, once. Writes to memory that the
// receiver has detached change nothing any more.
//
// With `shared_memory` the same network behaves as the shm transport: the box reads the workers'
// memory, workers read the box's, only immediates move, and queue pairs do not break.
//
// A worker may be on the host of one box of its job. With that it exchanges as with tcp's near
// connections (transport/tcp/near.h): in order, nothing is lost on the way, and the box copies, a
// gradient into its slot when the arrival is polled, a result into the worker's memory before it is
// announced. The box always hears when the worker ends.
//
//   SimNet ── transport(box) ──▶ open_job() ──▶ BoxLink, one Endpoint per core
//          └─ connect(offer) ──▶ WorkerLink, one Endpoint, with queue pairs to all boxes of the
//          offer
//
// Source memory is read when a write lands, not when it is posted, and memory without defined
// content is filled with garbage: this exposes a side that writes or reads too early.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/sim/time.h"
#include "transport/sim/trace.h"
#include "transport/transport.h"

namespace phub {

using SimMemory = std::shared_ptr<std::vector<std::byte>>;

// xoshiro256**, seeded with splitmix64: the same numbers on every machine.
class SimRandom {
 public:
  explicit SimRandom(uint64_t seed);
  uint64_t next();
  uint64_t below(uint64_t n);                     // [0, n); 0 for n == 0
  uint64_t between(uint64_t low, uint64_t high);  // [low, high]
  bool chance(double probability);

 private:
  uint64_t state_[4];
};

struct SimOptions {
  uint64_t seed = 1;
  bool shared_memory = false;
  bool shared_slots = false;  // with windows, workers share slots, as over RDMA; else as over tcp
  uint64_t min_delay_ns = 1'000;
  uint64_t max_delay_ns = 20'000;
  uint64_t retransmit_ns = 100'000;  // the time that a lost packet costs
  double loss = 0;                   // probability, per transmission
  double duplicate = 0;              // probability, per write that arrives
  double early = 0.1;                // per write: part of its payload lands before the rest
  double break_chance = 0;           // probability, per write
  double overtake = 0;               // per write: it overtakes those before it on its queue pair
  uint32_t retry_limit = 7;          // losses in a row that break a queue pair
  uint32_t send_depth = 64;          // writes of a queue pair that may be unacknowledged
};

struct SimStats {
  uint64_t writes = 0, delivered = 0, lost = 0, duplicates = 0, breaks = 0, refused = 0;
  uint64_t overtakes = 0;    // writes that arrived before an earlier one of their queue pair
  uint64_t near_writes = 0;  // those that arrived within a host
  uint64_t window_writes = 0, window_growths = 0;  // into windows (slot_window.h); that these grew
  uint64_t taken = 0;  // times that a worker heard that its gradient was, where slots are shared
  uint64_t near_links = 0, mixed_links = 0;  // workers that exchange within a host alone, or also
};

class SimTransport;
struct SimIncarnation;

class SimNet : public SimTime, public SimTrace {
 public:
  explicit SimNet(const SimOptions& options);
  ~SimNet();  // all links must be gone
  SimNet(const SimNet&) = delete;
  SimNet& operator=(const SimNet&) = delete;

  Transport& transport(uint32_t box = 0);
  // `near`: the box on the worker's host. Throws Error(kUnauthorized) when the ticket was never
  // given, was used, or has been revoked.
  static constexpr uint32_t kNoBox = ~uint32_t{0};
  std::unique_ptr<WorkerLink> connect(const Offer& offer, uint32_t near = kNoBox);
  // From a box below it: threads of the layout are cores of `below`, which its core_awake() counts.
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout, uint32_t below,
                                      uint32_t near = kNoBox);
  std::vector<WorkerLink*> links_from(uint32_t box) const;

  // Faults. `worker` is a link made by connect().
  // The process of a worker ends: its posts arrive up to some point. With `silent` its host died
  // too, and the box hears nothing.
  void crash(WorkerLink& worker, bool silent);
  // Breaks one of its queue pairs. False: it has none that is whole, or this is shared memory.
  bool break_queue_pair(WorkerLink& worker);
  void set_loss(double loss) { options_.loss = loss; }
  // The device that serves a core of this worker's job, counted over its boxes, dies: either the
  // NIC says so, or the core's next call fails. False: the boxes have let go of the worker.
  bool fail_device(WorkerLink& worker, uint32_t core, bool said);

  // Whether the box has closed its end of one of the worker's queue pairs.
  static bool closed_by_box(WorkerLink& worker);

  // Whether something has come for an endpoint of this network that was armed, since the last
  // disarm(). An endpoint that was never armed is always awake.
  static bool awake(const Endpoint& endpoint);
  // Any endpoint of this core of a box.
  bool core_awake(uint32_t core, uint32_t box = 0) const;
  bool has_events(uint32_t box) const;  // events of its transport that were not handled

  const SimOptions& options() const { return options_; }
  SimRandom& random() { return random_; }
  SimStats& stats() { return stats_; }

  // The time that a packet, or a whole write with its retransmissions (kLost: the retry limit was
  // reached), is under way, for the queue pairs of this network.
  static constexpr uint64_t kLost = ~uint64_t{0};
  uint64_t some_delay();
  uint64_t flight_ns();

  // Its worker links call it. Throws Error(kUnauthorized) as connect() does.
  std::vector<SimIncarnation*> find(const Offer& offer) const;
  SimMemory garbage(uint64_t bytes);
  uint32_t next_pair_id() { return pairs_made_++; }

 private:
  SimTransport* box_at(uint32_t box) const;  // kNoBox: null

  SimOptions options_;
  SimRandom random_;
  SimStats stats_;
  uint32_t pairs_made_ = 0;
  std::vector<std::unique_ptr<SimTransport>> transports_;  // by box
};

}  // namespace phub
