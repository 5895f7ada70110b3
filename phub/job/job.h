// A job on the box: the box's part of it, the plan over all boxes that serve it, and its
// membership. Control thread; it is made and freed as its part is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "phub/job/job_part.h"
#include "phub/job/membership.h"
#include "phub/job/remote_copy.h"

namespace phub {

class Job : public JobPart {
 public:
  // Parameters are those of JobPart, but `plan` is for all boxes, of which this is the first.
  Job(std::shared_ptr<const JobSpec> spec, Plan plan, Transport& transport, kernels::Store store,
      bool snapshots = false, const Manifest* restored = nullptr, const Rack* rack = nullptr,
      const SwitchedJob* switched = nullptr, const Standby* standby = nullptr);

  // The memory that it will take here: that of JobPart, and copies of other boxes' parts of its
  // checkpoints.
  static NodeMemory memory_for(const Plan& plan, const JobSpec& spec, bool snapshots,
                               uint64_t saved_ranks, const Rack* rack = nullptr,
                               const SwitchedJob* switched = nullptr,
                               const Standby* standby = nullptr);
  NodeMemory memory() const;
  // The memory, beside that, of a checkpoint's branches that are still to be copied, for all boxes:
  // this box holds its own part until it is copied, and others' parts until they have fetched them.
  static uint64_t docked_bytes_for(const Plan& plan, const JobSpec& spec,
                                   const SavedBranches& saved);

  // The plan of all boxes; plan() is this box's part of it.
  const Plan& whole_plan() const { return whole_ ? *whole_ : plan(); }
  uint32_t boxes() const { return boxes_of(whole_plan()); }
  uint32_t all_cores() const { return static_cast<uint32_t>(whole_plan().cores.size()); }
  uint32_t box_of(const ChunkLayout& chunk) const;  // by the whole plan
  Membership& membership() { return membership_; }

  // Call visit(elements) for the parts of one array and key in order, in whichever box its chunks
  // are: for the snapshot's copies, or for the values that the job goes on from. `shelf`: as for
  // own_array().
  using VisitPart = std::function<void(std::span<float> elements)>;
  void for_each_part_of_copy(uint32_t shelf, size_t array, size_t key,
                             const VisitPart& visit) const;
  void for_each_part(uint32_t shelf, size_t array, size_t key, const VisitPart& visit);
  // A branch that has no place yet, as each box's part, by box. make_branch() takes long; any
  // thread. Throws Error(kFull).
  using Branch = std::vector<Shelf>;
  Branch make_branch() const;
  static uint64_t branch_bytes(const Plan& whole, const JobSpec& spec);
  void for_each_part(const Branch& branch, size_t array, size_t key, const VisitPart& visit) const;
  // Does what JobPart::publish_restored() does, restores the membership, and fills the docks and
  // copies of other boxes. REQUIRES: no core and no other box has the job yet.
  void publish_restored(const Manifest& saved);
  // The image of another box's part, from 1 on; empty if there is nothing to save.
  SavedImage image_of(uint32_t box) const;
  // The image of the values that the job goes on from in that box, its docks included.
  SavedImage restored_image_of(uint32_t box);
  std::vector<Shelf> take_docks_of_others();  // REQUIRES: the boxes have fetched them
  void take_clocks_of_others();               // from their copies, which are complete
  // The bytes that have grown since it was made: the log, changes of hyperparameters, orders about
  // branches, and branches that are killed or come back.
  uint64_t grown_bytes() {
    return membership_.log().bytes() + hyper().bytes() + branch_orders().bytes() +
           membership_.changes().decisions().branches().killed_bytes() + docked_bytes();
  }

 private:
  struct Split {
    explicit Split(Plan plan);
    std::unique_ptr<Plan> whole;  // null: the part is all
    Plan part;
  };
  Job(std::shared_ptr<const JobSpec> spec, Split plan, Transport& transport, kernels::Store store,
      bool snapshots, const Manifest* restored, const Rack* rack, const SwitchedJob* switched,
      const Standby* standby);

  template <typename ArrayOf>
  void visit_parts(size_t key, const ArrayOf& array_of, const VisitPart& visit) const;

  using Docks = std::map<uint32_t, Shelf>;  // by shelf
  Shelf make_shelf_of(uint32_t box) const;
  void make_docks_of_others(const SavedBranches& saved);

  const std::unique_ptr<const Plan> whole_;  // null: this box has all of it
  std::vector<RemoteCopy> copies_;           // for the second box and further ones
  std::vector<Docks> docks_of_others_;       // likewise, until the boxes have them
  Membership membership_;
};

}  // namespace phub
