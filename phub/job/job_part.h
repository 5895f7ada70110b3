// A box's part of a job, which is all of it unless several boxes serve together: its plan, memory
// and link, and the cores' parts of it. The control thread owns it, but for the objects that the
// cores were handed. Another thread makes and frees it, as that takes long. All memory is there
// when the constructor returns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "numa/memory.h"
#include "numa/topology.h"
#include "phub/checkpoint/manifest.h"
#include "phub/core/branch_orders.h"
#include "phub/core/core_job.h"
#include "phub/core/hyper.h"
#include "phub/core/quorum_gate.h"
#include "phub/core/round_gate.h"
#include "phub/core/uplinked.h"
#include "phub/job/memory.h"
#include "phub/job/rack.h"
#include "phub/job/saved_image.h"
#include "phub/job/standby.h"
#include "phub/job/switched.h"
#include "phub/job_rules.h"
#include "phub/plan/plan.h"
#include "transport/control/job_spec.h"
#include "transport/control/key_schedules.h"
#include "transport/transport.h"

namespace phub {

// Fills in max_ranks, which follows from the rest, and checks the words that validate() cannot
// know: optimizer, formats, hyperparameters. Throws Error(kInvalid).
void complete_spec(JobSpec& spec);

// The place of a box's queues among those of all boxes, as workers count them.
struct QueueNumbers {
  uint32_t first = 0;
  uint32_t all = 0;          // 0: this box has all
  uint32_t other_boxes = 0;  // at the server: the other boxes with parts
};

class JobPart {
 public:
  // With `snapshots` it takes snapshots, and has memory for its part of them. A job that goes on
  // from a checkpoint (`restored`; null: it is new) gets its values from SavedJobs::load() before a
  // core has it. REQUIRES: complete_spec(spec), at least as many restored.ranks as max_ranks.
  // Throws Error. `rack` is for a box with a parent (null: it has none); then the plan's units are
  // the parent's queues. `switched` is the switch through which its int32 chunks come; null: none.
  // `standby` is the box that stands by for this one, whose queues are the plan's units; null:
  // none.
  JobPart(std::shared_ptr<const JobSpec> spec, Plan plan, Transport& transport,
          kernels::Store store, bool snapshots = false, const Manifest* restored = nullptr,
          QueueNumbers queues = {}, const Rack* rack = nullptr,
          const SwitchedJob* switched = nullptr, const Standby* standby = nullptr);

  const JobSpec& spec() const { return *spec_; }
  const JobRules& rules() const { return rules_; }
  const Plan& plan() const { return plan_; }
  const NodeMemory& memory() const { return memory_; }
  BoxLink& link() { return *link_; }
  const RankRange& ranks() const { return ranks_; }  // those that the box serves
  const SwitchOffer& switch_offer() const {
    return switch_offer_;
  }  // without streams there is no offer
  // Makes the connections to the parent anew. Any thread. REQUIRES: there is a parent; the cores do
  // not use the link meanwhile. Throws Error.
  void reconnect(const Offer& offer) { uplink_->reconnect(offer); }
  // By core of the plan, which may leave out cores of the server.
  CoreJob& core_job(uint32_t core) { return *core_jobs_[core]; }
  uint32_t cores() const { return static_cast<uint32_t>(core_jobs_.size()); }

  HyperTable& hyper() { return hyper_; }
  BranchOrders& branch_orders() { return branch_orders_; }
  RoundGate* gate() { return gate_.get(); }              // null: rounds are not gated
  QuorumGates* quorum_gates() { return quorum_.get(); }  // null: rounds wait for all ranks

  // Those of all cores together.
  WindowsOfBox& windows() { return box_windows_; }
  // A line for the log, once, if they could not grow; else "".
  std::string note_of_windows();

  bool takes_snapshots() const { return takes_snapshots_; }
  // The f32 arrays of which a checkpoint keeps every element: the parameters, the optimizer's
  // states, and the view.
  static constexpr size_t kMostArrays = 4;
  size_t saved_arrays() const;  // up to kMostArrays; 0: the box has no state
  // The arrays that a checkpoint keeps of a shelf: the first of these.
  size_t arrays_of_shelf() const { return arrays_.shelves.each; }
  // The clocks of the latest snapshot, or of the checkpoint that the job goes on from;
  // SavedClocks::latest is null in lock-step.
  const SavedClocks& saved_clocks() const { return arrays_.copy.clocks; }
  std::vector<uint64_t> saved_steps(uint64_t round) const;  // in the manifest's form
  std::vector<uint64_t> saved_steps_of_shelf(uint32_t shelf) const;
  // The images of the snapshot's copy, and of the values that the job goes on from, docks included.
  // Both have the clocks and the steps of shelves behind the arrays.
  SavedImage image_of_copy() const { return image_of(arrays_.copy); }
  SavedImage image_of_values();
  // One of saved_arrays(), or one of a shelf (from 1 on) or dock, in the layout of the box's
  // memory: the job's own, and the snapshot's copy.
  float* own_array(uint32_t shelf, size_t array) { return array_of(loaded(), shelf, array); }
  float* copied_array(uint32_t shelf, size_t array) const {
    return array_of(arrays_.copy, shelf, array);
  }
  // The optimizer's steps on a shelf, by chunk of the job: the job's own, and the snapshot's copy.
  uint64_t* own_steps(uint32_t shelf) { return arrays_.shelves.steps[shelf - 1]; }
  uint64_t* copied_steps(uint32_t shelf) { return arrays_.copy.shelves.steps[shelf - 1]; }
  // The state of one branch, laid out as a shelf.
  struct Shelf {
    std::vector<numa::Memory> arrays;
    std::vector<uint64_t> steps;  // by chunk of the job

    float* array(size_t i) const { return reinterpret_cast<float*>(arrays[i].bytes().data()); }
    uint64_t bytes() const;
    SavedImage image();  // the arrays, then the steps
  };
  Shelf make_shelf()
      const;  // All its memory is there. Takes long; any thread. Throws Error(kFull).
  uint64_t shelf_bytes() const;
  // Puts `with` into the dock of `shelf` (branch_orders.h) and returns the former content; an empty
  // Shelf means that the dock is empty. REQUIRES: no core copies from the dock now.
  Shelf exchange_dock(uint32_t shelf, Shelf with);
  uint64_t docked_bytes() const;
  bool has_dock(uint32_t shelf) const { return !docks_[shelf - 1].arrays.empty(); }
  // Converts steps from a checkpoint's form to one number per chunk. Throws Error(kInvalid).
  void take_steps(const std::vector<uint64_t>& from, uint64_t round, uint64_t* to) const;
  // Gives the cores the saved clocks and orders, and makes the results from the arrays. REQUIRES:
  // the arrays and clocks have their values; no core has the job yet.
  void publish_restored(const Manifest& saved);
  // "key 'conv1.weight', elements 0 to 8191": for error messages.
  std::string where(uint32_t chunk) const;

 private:
  template <typename Arrays>
  static float* array_of(const Arrays& arrays, uint32_t shelf, size_t array) {
    if (shelf > 0) return arrays.shelves.arrays[(shelf - 1) * arrays.shelves.each + array];
    for (float* each : {arrays.parameters, arrays.state0, arrays.state1, arrays.view}) {
      if (each && array-- == 0) return each;
    }
    return nullptr;
  }
  // The arrays that a checkpoint is loaded into. In place of states of 8 bits, or of pieces, these
  // are the snapshot's f32 copies, from which publish_restored() makes them.
  JobArrays loaded() const;
  template <typename Arrays>
  SavedImage image_of(const Arrays& arrays) const;
  void make_arrays(uint32_t saved_ranks);
  void make_states8(size_t states);
  void make_state_pieces(size_t states);
  void take_loaded_states();  // from loaded()
  std::unique_ptr<KeySteps> make_key_steps(uint32_t cores) const;
  // One set of shelves: the job's own, with docks, or the copies of them.
  struct ShelfMemory {
    std::vector<Shelf> shelves;
    std::vector<float*> arrays;  // JobArrays refers to these two
    std::vector<uint64_t*> steps;
  };
  void make_docks(const SavedBranches& saved);
  ShelfArrays make_shelves(ShelfMemory& made, bool with_docks) const;
  LinkLayout layout_above(const Layout& above, const ResultFormat& results) const;
  CoreUplink uplink_of(uint32_t core, const Layout& box_above);
  std::unique_ptr<Way> make_quorum(const Stages& stages, uint32_t core, const Standby* standby);
  std::vector<uint64_t> gathered(const uint64_t* steps) const;
  std::vector<CoreChunk> chunks_of(uint32_t core) const;
  SlotWindow* make_window(uint32_t core);
  SharedSlots* make_shared_slots(uint32_t core);

  const std::shared_ptr<const JobSpec> spec_;  // with a million keys it has 300 MB
  const Plan plan_;
  const JobRules rules_;  // those for this box
  const RankRange ranks_;
  const bool has_parent_;
  const NodeMemory memory_;
  const KeyClasses classes_;
  const KeySchedules schedules_;
  HyperTable hyper_;
  BranchOrders branch_orders_;
  const bool takes_snapshots_;
  const SwitchOffer switch_offer_;
  WindowsOfBox box_windows_;
  bool told_of_refusal_ = false;
  std::vector<std::unique_ptr<SlotWindow>> windows_;  // by core; empty: there are slots
  std::vector<std::unique_ptr<SharedSlots>> shared_;  // by core; empty: each chunk has its own
  std::unique_ptr<BoxLink> link_;
  std::array<numa::Memory, kMostArrays> memory_of_arrays_;
  std::array<numa::Memory, kMostArrays> memory_of_copies_;
  numa::Memory memory_of_clocks_;
  numa::Memory memory_of_sums_;
  numa::Memory memory_of_new_state_;
  std::vector<StatePiece> state_pieces_;  // by chunk of the job; empty: states are laid out as keys
  ShelfMemory shelves_, copied_shelves_;
  std::vector<Shelf> docks_;  // by shelf
  JobArrays arrays_;
  std::unique_ptr<RoundGate> gate_;      // null: rounds are not gated
  std::unique_ptr<QuorumGates> quorum_;  // null: rounds wait for all ranks
  std::unique_ptr<WorkerLink> uplink_;   // to the parent, or the standby; null: there is none
  std::vector<std::unique_ptr<CoreJob>> core_jobs_;
};

}  // namespace phub
