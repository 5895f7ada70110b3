// A run of the digits example, recomputed in one process from the membership log.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/messages.h"
#include "worker/examples/digits_data.h"
#include "worker/examples/digits_training.h"

namespace phub::digits {

// The final parameters, all keys one after another. In every round, the gradients of the ranks that
// took part in a chunk are added in rank order by the scalar reference of the kernels, which then
// does the optimizer's step. Throws Error(kInvalid) where the log contradicts itself or leaves a
// round without any rank.
std::vector<float> recompute(const Training& training, const Samples& train,
                             std::span<const LogRecord> log);

// The log of a run in which nothing happened.
std::vector<LogRecord> quiet_log(uint32_t world);

}  // namespace phub::digits
