// One core's part of one job: the way of the core's chunks from arrival to write-back.
//
//   Endpoint ─▶ receive() ─▶ ChunkTable ─▶ ReadyChunks ─▶ Way ─▶ Outbox ─▶ Endpoint
//               checks it     who arrived   which next     │      results to their readers
//                                                          └─ Reducer: sum, optimizer
//
// The control thread makes it; then the core's thread owns it until it reports kRemoved. Nothing
// here allocates after construction, or makes system calls but the endpoint's; except for a window
// that grows (shortage.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phub/core/arrival_check.h"
#include "phub/core/chunk_table.h"
#include "phub/core/intake.h"
#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/core/moves.h"
#include "phub/core/outbox.h"
#include "phub/core/places.h"
#include "phub/core/ready_chunks.h"
#include "phub/core/reducer.h"
#include "phub/core/reports.h"
#include "phub/core/shelves.h"
#include "phub/core/shortage.h"
#include "phub/core/trace.h"
#include "phub/core/way.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace phub {

class CoreJob {
 public:
  // Makes the way of a job in lock-step, if that is not LockStep itself (gated.h, quorum.h).
  using MakeLockStep = std::function<std::unique_ptr<Way>(const Stages&)>;

  // `chunks` come queue after queue, those of a queue in the order of their index in it. The arrays
  // behind `hyper` outlive the core job, or a boundary replaces them. The ranks in `expected` take
  // part from round 1 on. `window`: gradients are in its places; null: in slots. `shared`: they are
  // in slots that chunks share, and in the window if they were taken out of these; null: each chunk
  // has its own.
  CoreJob(uint32_t core, const JobParameters& parameters, const JobArrays& arrays,
          std::vector<CoreChunk> chunks, BoxEndpoint& endpoint, const HyperView& hyper,
          std::span<const uint32_t> expected, uint32_t queues = 1,
          const MakeLockStep& make_lock_step = {}, SlotWindow* window = nullptr,
          SharedSlots* shared = nullptr);

  // bytes() computes, before a core job is made, the memory that it holds, itself and its scratch
  // included.
  struct Size {
    uint64_t chunks = 0, queues = 1, max_ranks = 1;
    uint64_t classes = 1;        // classes of keys
    uint64_t largest_chunk = 0;  // elements
    uint64_t levels = 1;         // levels of the tree of ranks
    uint64_t places = 1;         // places of branches, docks included
    bool lock_step = true;
    bool gated = false;
    uint32_t fragments = 0;  // of a job with a quorum; 0: it has none
    bool shares_slots = false;
    bool differences = false;
    bool lazy = false;  // some key is
    bool of_racks = false;
    bool weighs = false;
    bool has_parent = false;
    bool has_standby = false;
  };
  static uint64_t bytes(const Size& size);

  // Restores the clocks of a job that goes on from a checkpoint, and the orders about branches that
  // are still to be carried out; they live until a boundary brings others. REQUIRES: no core has
  // the job yet.
  void restore(const SavedClocks& clocks, std::span<const BranchOrder> orders) {
    way_->restore(clocks);
    shelves_.take(orders);
  }

  // Writes a trace to `log` from here on, with `job` as this job's number in it. REQUIRES: no core
  // has the job yet.
  void trace(TraceLog& log, uint32_t core, uint32_t job) {
    trace_.start(log, core, job, table_.size());
  }

  // One pass: receives arrivals, completes chunks until it has read and written kPassBytes, writes
  // back. True if anything moved. Adds what it has read and written to `bytes`.
  static constexpr uint64_t kPassBytes = uint64_t{1} << 20;
  bool step(uint64_t& bytes);
  bool step() {
    uint64_t bytes = 0;
    return step(bytes);
  }

  // The elements of chunk `index` that a place (branch_orders.h) has now. Core's thread.
  const float* elements_of(uint32_t place, Places::Array array, uint32_t index) const {
    return places_.at(place, array, table_[index]);
  }

  // Grows with every event that changes the answer to a probe. Any thread.
  uint64_t activity() const { return activity_.load(std::memory_order_acquire); }

  // The core that has the job keeps these.
  struct Turn {
    uint64_t bytes = 0;  // read and written, and not paid for with passes yet
    uint32_t idle_passes = 0;
    uint64_t retry_ms = 0;  // put aside: when to retry owed results; 0: it owes none
    bool moved = false;
    bool awake = false;
  };
  Turn turn;

  // Boundaries (boundary.cc), as decoded from the mailbox.
  CoreReport hold();
  uint64_t commit(const Boundary& boundary);  // the lowest round in progress after it
  void probe(Probe& out) const;
  void detach(uint32_t rank);  // CoreReport::kNoRank: the parent
  void detach_all();
  void reattach(uint32_t rank, uint32_t incarnation);  // after a reconnection

  // Takes the next report that the core has to forward to the control thread.
  bool next_report(CoreReport& out);

  // The job cannot go on here. From now on steps do nothing, and the last report says so; the first
  // reason counts.
  void fail(const std::string& why);
  const std::string& failure() const {
    return failure_;
  }  // other threads: after kFailed was reported

  // Before sleeping: arms the endpoint to wake the core when a chunk may become complete or, if
  // nothing has arrived since it was last armed, at any arrival. Returns false if there is work.
  bool arm();
  // The endpoint is armed for one rank alone: probes have to look whether others wait for it.
  bool waits_for_one() const { return waits_for_one_; }
  void disarm() {
    endpoint_.disarm();
    way_->disarm();
  }
  int wake_fd() const { return endpoint_.wake_fd(); }
  // The descriptors by which results that come from elsewhere wake this core; -1: none.
  std::array<int, 2> way_fds() const { return way_->wake_fds(); }
  // Edge triggered; -1: nothing comes otherwise than through the endpoint.
  int input_fd() const { return intake_ ? intake_->fd() : -1; }
  bool is_called() const { return failure_.empty() && way_->is_called(); }

  uint32_t core() const { return core_; }
  // Results wait for their rank to connect, for room in a queue or for the budget of a NIC, or sums
  // wait like this on their way to the parent, or gradients for a place in a window. It may be that
  // nothing rings when the wait is over.
  bool owes() const {
    return (outbox_.owes() || way_->waits_for_room_ns() > 0 || shortage_.is_there()) &&
           failure_.empty();
  }
  // The time until the next try. If the wait is unknown, each time is twice the one before, until
  // something goes out or the endpoint has rung. REQUIRES: owes().
  uint64_t retry_ms();
  void rung() { retries_in_vain_ = 0; }

 private:
  // Hot; TheWay is LockStep, Quorum or Clocked, most of whose functions are final.
  template <typename TheWay>
  bool pass(TheWay& way, uint64_t& bytes);
  template <typename TheWay>
  void receive(TheWay& way, const Arrival& arrival);
  template <typename TheWay>
  void receive_lost(TheWay& way, uint32_t rank, uint32_t index);
  template <typename TheWay>
  bool take_in(TheWay& way, uint64_t& bytes);
  void make_ready(uint32_t index) { ready_.insert(index, table_.follows(index)); }
  template <typename TheWay>
  bool finish_pending(TheWay& way, uint64_t& bytes);
  template <typename TheWay>
  bool close_ready(TheWay& way, uint64_t& bytes);
  template <typename TheWay>
  uint64_t finish(TheWay& way, uint32_t index);
  void insert_ready();
  uint64_t cost_of(const CoreChunk& chunk, uint32_t ranks) const;

  void receive_initial(uint32_t rank, uint32_t index, uint32_t part, bool heard_before);
  void receive_request(uint32_t rank, uint32_t index, const Imm& imm, bool heard_before);
  void lose_connection(uint32_t rank, bool by_violation);
  void violation(uint32_t rank, uint32_t index, CoreReport::Violation what, uint64_t said);
  void lose(const Boundary::Lost& lost);
  void admit(const Boundary::Admitted& admitted);
  void attach(uint32_t rank, uint32_t incarnation);
  void note_activity() {
    activity_.store(activity_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  BoxEndpoint& endpoint_;
  const JobParameters parameters_;
  CoreTrace trace_;
  ChunkTable table_;
  const ArrivalCheck check_;
  ReadyChunks ready_;
  Places places_;
  Reports reports_;
  Reducer reducer_;
  Outbox outbox_;
  Moves moves_;
  Shelves shelves_;
  const std::unique_ptr<Way> way_;
  Intake* const intake_;  // the way's; null: it has none
  Shortage shortage_;

  const uint32_t core_;
  uint64_t arrivals_ = 0;                  // ever
  bool pass_was_full_ = false;             // the pass ended with work left
  uint64_t arrivals_when_armed_ = kNever;  // kNever: it was not armed yet
  bool waits_for_one_ = false;
  std::vector<uint32_t> wake_after_;
  uint32_t retries_in_vain_ = 0;
  bool is_frozen_ = false;  // the source that this box stands by for is detached
  std::string failure_;     // empty: none
  bool failure_reported_ = false;
  std::atomic<uint64_t> activity_{1};  // written by the core's thread alone
};

}  // namespace phub
