// The enumerated options of a job. Its spec holds them as words.
#pragma once

#include <optional>

#include "kernels/fold.h"
#include "kernels/kernels.h"
#include "transport/control/choices.h"
#include "transport/control/job_spec.h"

namespace phub {

struct Choices {
  kernels::Optimizer optimizer;
  kernels::DType parameter_dtype;            // the format of results in memory
  std::optional<kernels::DType> difference;  // results come back as differences in this format
  Consistency consistency;
  Reduction reduction;
  Work work;
  Initial initial;
  OnLoss on_loss;
  OnNonFinite on_nonfinite;
  Unused unused;
  bool gated;  // rounds are applied as a whole: max_norm is given, or rounds may be skipped

  bool lock_step() const { return consistency == Consistency::kBsp; }
};

// Throws Error(kInvalid), which names the field, the allowed words and the given one.
Choices choices_of(const JobSpec& spec);
// The format of a key's gradients, or of their factors. Throws likewise.
kernels::DType gradient_dtype(const JobSpec& spec, const KeySpec& key);
// The operation in place of an addition for its contributions, if there is one. Throws likewise.
kernels::Fold fold_of(const KeySpec& key);

}  // namespace phub
