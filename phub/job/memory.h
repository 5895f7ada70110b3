// What a job needs of the box's memory, counted before anything is allocated.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phub/job/rack.h"
#include "phub/plan/plan.h"

namespace phub {

// What a job needs on one node, in bytes, every holder added up.
struct NodeMemory {
  uint32_t os_node = 0;
  uint64_t slots = 0;        // gradients of max_ranks ranks; over shared memory, the workers' own
  uint64_t parameters = 0;   // what is written back; the view, and differences from it
  uint64_t master = 0;       // f32 parameters, where what is written back is not these
  uint64_t state = 0;        // of the optimizer
  uint64_t sums = 0;         // of a round that is gated, f32; to a parent, with the results from it
  uint64_t shelves = 0;      // of the branches that do not run: f32 arrays, and their steps
  uint64_t snapshot = 0;     // a copy of what is saved (f32 arrays and clocks), for snapshots
  uint64_t bookkeeping = 0;  // the plan, the state of every chunk, rings, scratch
  uint64_t total() const {
    return slots + parameters + master + state + sums + shelves + snapshot + bookkeeping;
  }
};

// Whether the box has anything of the job to save: without an optimizer, sums in lock-step are the
// workers' own, and so is the model.
bool box_has_state(const JobSpec& spec);
// The f32 arrays of it that the optimizer works on: the parameters and its states; 0: it has none.
size_t optimized_arrays_of(const JobSpec& spec);
// And those that a checkpoint keeps: at last the view, where results come back as differences.
size_t saved_arrays_of(const JobSpec& spec);

// One entry per node in use, ascending. `snapshots`: whether the server takes them.
// `saved_ranks`: of the checkpoint that the job goes on from, which may be more than it has now.
// `rack`: of a box with a parent, null: it has none.
// Throws Error(kInvalid) on words of `spec` that are unknown.
std::vector<NodeMemory> memory_needed(const Plan& plan, const JobSpec& spec, bool snapshots = false,
                                      uint64_t saved_ranks = 0, const Rack* rack = nullptr);
// The sum of all nodes.
NodeMemory total_memory(const Plan& plan, const JobSpec& spec, bool snapshots = false,
                        uint64_t saved_ranks = 0, const Rack* rack = nullptr);

// For people: a table, with a line per node.
std::string describe_memory(const Plan& plan, const JobSpec& spec, bool snapshots = false);

// What all jobs hold, and what they may hold. The builder reserves and releases; the control thread
// adds what running jobs grow by.
class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit) : limit_(limit) {}

  uint64_t limit() const { return limit_; }
  uint64_t used() const { return used_; }
  bool has_room(uint64_t bytes) const {
    const uint64_t used = used_;
    return used <= limit_ && bytes <= limit_ - used;
  }
  uint64_t excess() const { return used_ > limit_ ? used_ - limit_ : 0; }
  // Throws Error(kFull) that adds up what the job needs.
  void reserve(const JobSpec& spec, const NodeMemory& memory);
  void release(uint64_t bytes) { used_ -= bytes; }
  void grow(uint64_t before, uint64_t now) { used_ += now - before; }
  // What a join with this text takes once it is decoded, until the result is gone; null: next to
  // nothing. Any thread. Throws Error, kUnavailable where there is room when other joins are done,
  // or kFull.
  std::shared_ptr<void> hold_for_join(std::string_view text);

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
  // Beside it, by joins: what they hold may outlive this.
  const std::shared_ptr<std::atomic<uint64_t>> held_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace phub
