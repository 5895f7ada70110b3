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
  // As JobPart; `plan` is for all boxes, of which this is the first.
  Job(std::shared_ptr<const JobSpec> spec, Plan plan, Transport& transport, kernels::Store store,
      bool snapshots = false, const Manifest* restored = nullptr, const Rack* rack = nullptr,
      const SwitchedJob* switched = nullptr);

  // What it will take here: as JobPart, and what other boxes have of its checkpoints.
  static NodeMemory memory_for(const Plan& plan, const JobSpec& spec, bool snapshots,
                               uint64_t saved_ranks, const Rack* rack = nullptr,
                               const SwitchedJob* switched = nullptr);
  NodeMemory memory() const;
  // And of branches that a checkpoint has and that are still to be copied, in all boxes: those of
  // this one until they are, those of others until they have fetched them.
  static uint64_t docked_bytes_for(const Plan& plan, const JobSpec& spec,
                                   const SavedBranches& saved);

  // Of all boxes; plan() is this box's part of it.
  const Plan& whole_plan() const { return whole_ ? *whole_ : plan(); }
  uint32_t boxes() const { return boxes_of(whole_plan()); }
  uint32_t all_cores() const { return static_cast<uint32_t>(whole_plan().cores.size()); }
  uint32_t box_of(const ChunkLayout& chunk) const;  // of the whole plan
  Membership& membership() { return membership_; }

  // Of one array and key, wherever its chunks are: calls visit(elements) for its parts in order, of
  // the snapshot's copies, or of what the job goes on from. `shelf`: as for own_array().
  using VisitPart = std::function<void(std::span<float> elements)>;
  void for_each_part_of_copy(uint32_t shelf, size_t array, size_t key,
                             const VisitPart& visit) const;
  void for_each_part(uint32_t shelf, size_t array, size_t key, const VisitPart& visit);
  // A branch that lies nowhere yet: what each box has of it, by box. Takes long; any thread. Throws
  // Error(kFull).
  using Branch = std::vector<Shelf>;
  Branch make_branch() const;
  static uint64_t branch_bytes(const Plan& whole, const JobSpec& spec);
  void for_each_part(const Branch& branch, size_t array, size_t key, const VisitPart& visit) const;
  // What the job's arrays and clocks have is what it goes on from. Before a core or another box
  // has the job.
  void publish_restored(const Manifest& saved);
  // Of another box, from 1 on; empty: there is nothing to save.
  SavedImage image_of(uint32_t box) const;
  // The same of what the job goes on from, with what lies in that box's docks.
  SavedImage restored_image_of(uint32_t box);
  std::vector<Shelf> take_docks_of_others();  // they have fetched them
  void take_clocks_of_others();               // from their copies, which are complete
  // What has grown since it was made: the log, changes of hyperparameters, orders about branches,
  // and those that are killed or come back.
  uint64_t grown_bytes() {
    return membership_.log().bytes() + hyper().bytes() + branch_orders().bytes() +
           membership_.branches().killed_bytes() + docked_bytes();
  }

 private:
  struct Split {
    explicit Split(Plan plan);
    std::unique_ptr<Plan> whole;  // null: the part is all
    Plan part;
  };
  Job(std::shared_ptr<const JobSpec> spec, Split plan, Transport& transport, kernels::Store store,
      bool snapshots, const Manifest* restored, const Rack* rack, const SwitchedJob* switched);

  template <typename ArrayOf>
  void visit_parts(size_t key, const ArrayOf& array_of, const VisitPart& visit) const;

  using Docks = std::map<uint32_t, Shelf>;  // by shelf
  Shelf make_shelf_of(uint32_t box) const;
  void make_docks_of_others(const SavedBranches& saved);

  const std::unique_ptr<const Plan> whole_;  // null: this box has all of it
  std::vector<RemoteCopy> copies_;           // of the second box and further ones
  std::vector<Docks> docks_of_others_;       // likewise, until they have them
  Membership membership_;
};

}  // namespace phub
