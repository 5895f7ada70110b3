// The options of a job that say how a round is made, from the spec that it was created with. The
// plan, the job, and the stages of a core all read these.
#pragma once

#include <optional>

#include "kernels/fold.h"
#include "kernels/kernels.h"
#include "transport/control/choices.h"
#include "transport/control/job_spec.h"
#include "transport/format_schedule.h"

namespace phub {

struct JobRules {
  kernels::Optimizer optimizer = kernels::Optimizer::kNone;
  kernels::DType parameter_dtype = kernels::DType::kF32;  // the format of results in memory
  std::optional<kernels::DType> difference = {};  // results are differences in this coded format
  Consistency consistency = Consistency::kBsp;
  Reduction reduction = Reduction::kSum;
  Work work = Work::kAll;
  Initial initial = Initial::kZeros;
  OnLoss on_loss = OnLoss::kShrink;
  OnNonFinite on_nonfinite = OnNonFinite::kStop;
  Unused unused = Unused::kZero;
  bool state8 = false;   // the optimizer's states have 8 bits (kernels/state8.h)
  bool gated = false;    // rounds are applied as a whole: is_gated()
  bool mirrors = false;  // the one rank is a box that this one stands by for, and has the results

  uint32_t quorum = 0;   // ranks that make a round (phub/core/quorum.h); 0: all
  float late_decay = 1;  // JobSpec
  bool weights = false;  // each contribution says its weight

  // False: every contribution is an update of its own (phub/core/clocked.h).
  bool lock_step() const { return consistency == Consistency::kBsp; }
  // Each rank has a copy of the results, as the parameters may change while it reads them.
  bool own_results() const { return !lock_step() || quorum > 0; }  // has_own_results()
  // Contributions have weights, which the ranks say, or which are less than 1 as they come late.
  bool weighs() const { return weights || late_decay < 1; }
  bool mean() const { return reduction == Reduction::kMean; }
  bool initial_broadcast() const { return initial == Initial::kBroadcast; }
};

// Throws Error(kInvalid), which names the field, the allowed words and the given one.
JobRules rules_of(const JobSpec& spec);
// The format of a key's gradients, or of their factors; if it changes by the round, the first one.
// Throws likewise.
kernels::DType gradient_dtype(const JobSpec& spec, const KeySpec& key);
// The operation in place of an addition for its contributions, if there is one. Throws likewise.
kernels::Fold fold_of(const KeySpec& key);

// What kernels/ calls the format of a round.
inline kernels::DType dtype_at(const FormatSchedule& schedule, uint64_t round) {
  return static_cast<kernels::DType>(schedule.number_at(round));
}

}  // namespace phub
