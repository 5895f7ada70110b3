// The memory that a job needs in the box, counted before any is allocated.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phub/job/rack.h"
#include "phub/plan/plan.h"
#include "transport/memory_limit.h"

namespace phub {

// The bytes that a job needs on one node, every holder added up.
struct NodeMemory {
  uint32_t os_node = 0;
  uint64_t slots = 0;        // gradients of max_ranks ranks; over shared memory, the workers' own
  uint64_t parameters = 0;   // the written-back values; the view, and differences from it
  uint64_t master = 0;       // f32 parameters, if they are not the written-back values
  uint64_t state = 0;        // the optimizer's
  uint64_t sums = 0;         // a gated round's, f32; those to a parent, with its results
  uint64_t shelves = 0;      // f32 arrays and steps of branches that do not run
  uint64_t snapshot = 0;     // a copy of the saved f32 arrays and clocks
  uint64_t bookkeeping = 0;  // the plan, the state of every chunk, rings, scratch
  uint64_t total() const {
    return slots + parameters + master + state + sums + shelves + snapshot + bookkeeping;
  }
};

// Whether the box has any state of the job to save: without an optimizer, in lock-step, the workers
// have the model.
bool box_has_state(const JobSpec& spec);
// The number of f32 arrays that the optimizer works on: the parameters and its states; 0: the box
// has none.
size_t optimized_arrays_of(const JobSpec& spec);
// The number of arrays that a checkpoint keeps: these, and the view if results come back as
// differences.
size_t saved_arrays_of(const JobSpec& spec);

// One entry per node in use, ascending. `snapshots`: whether the server takes them.
// `saved_ranks`: the ranks of the checkpoint that the job goes on from, perhaps more than it has
// now. `rack`: for a box with a parent; null: it has none. `at_standby`: the layout of the job at
// its standby; null: there is none. Throws Error(kInvalid) on unknown words of `of_job`.
std::vector<NodeMemory> memory_needed(const Plan& plan, const JobSpec& of_job,
                                      bool snapshots = false, uint64_t saved_ranks = 0,
                                      const Rack* rack = nullptr,
                                      const Layout* at_standby = nullptr);
// The sum of all nodes.
NodeMemory total_memory(const Plan& plan, const JobSpec& spec, bool snapshots = false,
                        uint64_t saved_ranks = 0, const Rack* rack = nullptr,
                        const Layout* at_standby = nullptr);

// Returns a table for people, with a line per node.
std::string describe_memory(const Plan& plan, const JobSpec& spec, bool snapshots = false);

// The memory that all jobs hold, and its limit. The builder reserves and releases; the control
// thread adds the growth of running jobs, and cores take what their windows grow by.
class MemoryBudget : public MemoryLimit {
 public:
  using MemoryLimit::MemoryLimit;

  // Throws Error(kFull) that adds up the job's needs.
  void reserve(const JobSpec& spec, const NodeMemory& memory);
  void grow(uint64_t before, uint64_t now) { used_ += now - before; }
  // Holds the memory of a join with this text, once it is decoded, until the result is destroyed;
  // null: it needs next to none. Any thread. Throws Error: kUnavailable if there is room when other
  // joins are done, else kFull.
  std::shared_ptr<void> hold_for_join(std::string_view text);

 private:
  // Memory of joins, beside used_. Its holders may outlive this.
  const std::shared_ptr<std::atomic<uint64_t>> held_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace phub
