// What one core does for one job: the chunks that it owns, from arrival to write back.
//
// Made by the control thread, then owned by the core's thread until it reports kRemoved. Nothing
// here allocates after construction; no system calls but the endpoint's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "phub/core_clocks.h"
#include "phub/core_messages.h"
#include "phub/core_trace.h"
#include "transport/nic.h"
#include "transport/wire.h"

namespace phub {

enum class OnNonFinite : uint8_t { kStop, kExclude, kPass };
enum class Work : uint8_t { kAll, kSumOnly, kNone };  // less than all: only to measure the tax

// The same on every core of a job.
struct JobParameters {
  uint32_t max_ranks = 1;
  kernels::DType gradient_dtype = kernels::DType::kF32;
  kernels::DType parameter_dtype = kernels::DType::kF32;
  kernels::Optimizer optimizer = kernels::Optimizer::kNone;
  bool mean = false;
  bool initial_broadcast = false;
  OnNonFinite on_nonfinite = OnNonFinite::kStop;
  Work work = Work::kAll;
  bool slots_belong_to_worker = false;
  bool lock_step = true;    // BSP; else updates are applied as they come (core_clocks.h)
  uint64_t slack = kNever;  // then: how far a rank may be ahead of the slowest
  kernels::Store store = kernels::kDefaultStore;
};

// Arrays of the whole job, laid out as the box's memory (offsets in elements); a core touches only
// its chunks.
struct JobArrays {
  std::byte* results = nullptr;  // parameter_dtype; what is written back
  uint64_t result_stride = 0;    // bytes; not in lock-step every rank has results of its own
  float* parameters = nullptr;   // f32; results' memory if those are f32; null: nobody needs them
  float* state0 = nullptr;
  float* state1 = nullptr;
};

struct CoreChunk {
  uint64_t round = 0;   // in progress; 0: initial parameters are awaited
  uint64_t offset = 0;  // in the box's arrays, elements
  uint64_t worker_offset = 0;
  uint32_t elements = 0;
  uint32_t missing = 0;  // ranks expected in this round and not here yet
  uint32_t arrived = 0;  // contributions here, null ones included
  uint32_t id = 0;       // in the plan
  int32_t priority = 0;
  uint16_t hyper_class = 0;
  uint16_t queue = 0;         // of the core's
  uint8_t initial_parts = 0;  // parts of the initial parameters taken so far
  bool queued = false;        // in the ready or the held list
};

class CoreJob {
 public:
  // `chunks` queue after queue, each in the order of their index in it. What `hyper` refers to
  // outlives the core job or is replaced by a boundary. The ranks in `expected` take part from
  // round 1 on.
  CoreJob(uint32_t core, const JobParameters& parameters, const JobArrays& arrays,
          std::vector<CoreChunk> chunks, Endpoint& endpoint, const HyperView& hyper,
          std::span<const uint32_t> expected, uint32_t queues = 1);

  // From here on what happens is written to `log`, with `job` as this job's number in it. Before
  // the core gets the job.
  void trace(TraceLog& log, uint32_t core, uint32_t job) {
    trace_ = std::make_unique<CoreTrace>(log, core, job, chunks_.size());
  }

  // One pass: takes arrivals, completes chunks until it has read and written kPassBytes, writes
  // back. True if anything moved. Adds what it has taken to `bytes`.
  static constexpr uint64_t kPassBytes = uint64_t{1} << 20;
  bool step(uint64_t& bytes);
  bool step() {
    uint64_t bytes = 0;
    return step(bytes);
  }

  // Grows whenever something happened that a probe would tell. Any thread.
  uint64_t activity() const { return activity_.load(std::memory_order_acquire); }

  // For the core that has the job.
  struct Turn {
    uint64_t bytes = 0;  // taken, and not paid for with passes yet
    uint32_t idle_passes = 0;
    bool moved = false;
    bool awake = false;
  };
  Turn turn;

  // Control, as decoded from the mailbox. Reports go to `reports` of the core.
  CoreReport hold();
  uint64_t commit(const Boundary& boundary);  // the lowest round in progress after it
  void probe(Probe& out) const;
  void detach(uint32_t rank);
  void detach_all();
  void attach(uint32_t rank, uint32_t incarnation);
  void reattach(uint32_t rank, uint32_t incarnation);  // after a reconnection

  // Reports of this job that are waiting to be taken by the core: at most one of a rank that broke,
  // one of the sum, and exclusions, which hold up their chunk where there are many.
  bool next_report(CoreReport& out);

  // The job cannot go on here. From now on steps do nothing, and the last report says so; the first
  // reason counts.
  void fail(const std::string& why);
  const std::string& failure() const { return failure_; }  // others: once kFailed was reported

  // Before sleeping: arms the endpoint so that it wakes when a chunk may become complete; when
  // nothing has come since it was armed before, for whatever comes.
  bool arm();
  // Armed for one rank alone: somebody has to look now and then whether others wait for it.
  bool waits_for_one() const { return waits_for_one_; }
  void disarm() { endpoint_.disarm(); }
  int wake_fd() const { return endpoint_.wake_fd(); }

  uint32_t core() const { return core_; }
  bool owes() const { return owed_total_ > 0; }  // results that wait for room in a queue

 private:
  struct Rank {
    uint64_t first_round = kNever;   // expected from this round on; kNever: not at all
    uint64_t results_from = kNever;  // gets the results of this round and later ones
    uint64_t arrivals = 0;
    const std::byte* slots = nullptr;
    uint32_t incarnation = 0;
    uint32_t pending = 0;  // contributions in chunks that are not complete
    bool attached = false;
    bool broken = false;
  };

  bool has(const std::vector<uint64_t>& bits, uint32_t chunk, uint32_t rank) const;
  void take(const Arrival& arrival);
  bool lies_right(const Arrival& arrival, uint32_t rank, uint32_t index, const Imm& imm);
  void take_gradient(uint32_t rank, uint32_t index, const Imm& imm);
  void mark_arrived(uint32_t rank, uint32_t index, bool null);
  void take_initial(uint32_t rank, uint32_t index, uint32_t part);
  void violation(uint32_t rank, uint32_t index, CoreReport::Violation what, uint64_t said);
  uint64_t next_round(uint64_t round) const;
  void begin_round(uint32_t index, uint64_t round);
  void check_ready(uint32_t index);
  void pop_ready();
  bool complete(uint32_t index);
  bool reduce_and_optimize(CoreChunk& chunk, uint32_t index);
  void gather(uint32_t index, const CoreChunk& chunk);
  bool lower(uint32_t a, uint32_t b) const;
  bool resolve_nonfinite(CoreChunk& chunk, uint32_t participants, float* sum);
  void write_back(uint32_t index);
  void send_result(uint32_t rank, uint32_t index);
  // Not in lock-step:
  void take_update(uint32_t rank, uint32_t index, const Imm& imm);
  bool complete_updates(uint32_t index);
  bool apply(uint32_t rank, uint32_t index);
  bool add_update(uint32_t rank, uint32_t index);
  void drop_update(uint32_t rank, uint32_t index);
  void release(uint32_t index);
  void copy_result(uint32_t rank, const CoreChunk& chunk);
  void begin_clocks(uint32_t index);
  uint64_t lose_clock(uint32_t rank, uint32_t index, uint64_t expected_again);
  void owe(uint32_t rank, uint32_t index);
  void pay();
  struct CachedStep;
  const CachedStep& step_of(const CoreChunk& chunk);
  float factor_of(const CoreChunk& chunk, uint32_t participants);
  void lose(const Boundary::Lost& lost);
  void admit(const Boundary::Admitted& admitted);
  uint32_t expected_in(uint64_t round) const;
  CoreReport& report(CoreReport::Type type, uint32_t rank, const CoreChunk* chunk);
  void recount_expected();
  size_t most_exclusions() const { return ranks_.size() + 64; }
  uint64_t cost_of(const CoreChunk& chunk) const;
  bool anyone_waits(uint32_t index) const;
  uint64_t lacking(uint32_t index, uint32_t word) const;
  uint64_t slowest(uint32_t index, uint32_t word) const;

  TraceLog* trace_log() { return trace_ ? trace_->log() : nullptr; }
  TraceEvent traced(const char* name, const CoreChunk& chunk) const {
    return trace_ ? trace_->event(name, chunk.id, chunk.round) : TraceEvent();
  }

  // Hot: one line each of what step() touches.
  Endpoint& endpoint_;
  const JobParameters parameters_;
  const JobArrays arrays_;
  std::vector<CoreChunk> chunks_;
  std::unique_ptr<CoreTrace> trace_;    // null: nobody asked
  std::vector<uint32_t> queue_first_;   // where each queue's chunks begin in chunks_, and the end
  std::vector<uint64_t> arrived_bits_;  // [chunk][words_]
  std::vector<uint64_t> null_bits_;
  std::unique_ptr<CoreClocks> clocks_;  // null: in lock-step
  std::vector<Rank> ranks_;
  std::vector<uint32_t> ready_;     // heap: highest priority, then lowest index, first
  std::vector<const void*> slots_;  // of the chunk being summed, in rank order
  std::vector<uint32_t> slot_ranks_;
  std::vector<float> scratch_;
  std::vector<QueueCounters> counters_;  // per queue
  uint32_t words_ = 1;
  uint32_t unflushed_ = 0;     // chunks completed since the last flush
  uint32_t attached_end_ = 0;  // one past the highest attached rank
  uint32_t expected_count_ = 0;
  uint64_t expected_from_ = 0;  // from this round on, expected_count_ ranks are expected
  uint64_t hold_from_ = kNever;
  bool stopped_ = false;  // a NaN under policy stop: nothing completes any more

  // Cold.
  uint32_t core_ = 0;
  HyperView hyper_;
  struct CachedStep {
    uint64_t round = kNever;
    kernels::Step step;
    double grad_scale = 1;
  };
  std::vector<CachedStep> steps_;  // per key class
  std::vector<uint32_t> held_;
  std::vector<uint64_t> owed_bits_;  // [rank][chunk word]: results that could not be posted yet
  std::vector<uint32_t> owed_count_;
  uint64_t owed_total_ = 0;
  std::vector<CoreReport> reports_;  // fixed capacity
  size_t exclusions_ = 0;            // in reports_
  uint64_t taken_ = 0;               // arrivals, ever
  uint64_t taken_when_armed_ = kNever;
  bool waits_for_one_ = false;
  std::string failure_;  // empty: none
  bool failure_reported_ = false;
  std::vector<uint32_t> wake_after_;
  std::vector<uint64_t> expected_bits_;
  uint64_t chunks_completed_ = 0;
  std::atomic<uint64_t> activity_{1};  // written by the core's thread alone
  void note_activity() {
    activity_.store(activity_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  bool settled_ = false;  // every chunk is past the latest change of who is expected
};

}  // namespace phub
