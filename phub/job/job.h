// A job on the box: the box's part of it, the plan over all boxes that serve it, and its
// membership. Control thread; it is made and freed as its part is.
#pragma once

#include <cstdint>
#include <memory>

#include "phub/job/job_part.h"
#include "phub/job/membership.h"

namespace phub {

class Job : public JobPart {
 public:
  // As JobPart; `plan` is for all boxes, of which this is the first.
  Job(const JobSpec& spec, Plan plan, Transport& transport, kernels::Store store,
      bool snapshots = false, const Manifest* restored = nullptr, const Rack* rack = nullptr);

  // Of all boxes; plan() is this box's part of it.
  const Plan& whole_plan() const { return whole_ ? *whole_ : plan(); }
  uint32_t boxes() const { return boxes_of(whole_plan()); }
  uint32_t all_cores() const { return static_cast<uint32_t>(whole_plan().cores.size()); }
  Membership& membership() { return membership_; }

  // After the job's arrays and clocks got their values, and before a core has the job.
  void publish_restored(const Manifest& saved);
  // What has grown since it was made: the log, changes of hyperparameters.
  uint64_t grown_bytes() { return membership_.log().bytes() + hyper().bytes(); }

 private:
  struct Split {
    explicit Split(Plan plan);
    std::unique_ptr<Plan> whole;  // null: the part is all
    Plan part;
  };
  Job(const JobSpec& spec, Split plan, Transport& transport, kernels::Store store, bool snapshots,
      const Manifest* restored, const Rack* rack);

  const std::unique_ptr<const Plan> whole_;  // null: this box has all of it
  Membership membership_;
};

}  // namespace phub
