// A gradient that is pushed as factors.
#pragma once

#include <span>

#include "transport/control/messages.h"
#include "worker/worker.h"

namespace phub {

// Throws Error(kInvalid): the key sends no factors, some are null, or there are too many.
void check_factors(const KeySpec& key, std::span<const FactorPairs> factors);

}  // namespace phub
