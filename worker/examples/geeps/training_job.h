// The job, the ranks and their files that the options of a training lead to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/control/job_spec.h"
#include "worker/examples/geeps/model.h"
#include "worker/examples/geeps/training.h"

namespace phub::examples {

// Throws Error(kInvalid) that names the option. The optimizer works on the sum: a worker's
// gradients are already divided by all samples of a clock.
JobSpec job_spec(const TrainingOptions& options, const Tables& tables);
double learning_rate(const TrainingOptions& options, uint64_t clock);

// `rank`: of the process.
Share share_of(const TrainingOptions& options, uint32_t rank, uint32_t device);
// The settings that all ranks must share: the model, the data, the optimizer with its rate;
// identity() adds the rank's share; a training goes on from a file of the same identity.
std::vector<std::string> settings_of(const std::string& name, const TrainingOptions& options);
std::string identity(const std::string& name, const TrainingOptions& options, const Share& share);

// From here on `rank` is that of a device. The file that a %r in its name makes one of this rank:
std::string with_rank(std::string path, uint32_t rank);
// Throw Error(kInvalid): several ranks would write the same file; this one could not.
void check_files(const TrainingOptions& options);
void check_can_write(const TrainingOptions& options, uint32_t rank);

}  // namespace phub::examples
