// A gradient that is pushed as rows.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/control/messages.h"
#include "worker/worker.h"

namespace phub {

// The places of the rows by ascending index; equal ones stay in their order. Throws
// Error(kInvalid): the key sends no rows, there is no such row, or there are too many.
std::vector<uint32_t> rows_in_order(const KeySpec& key, const GradientRows& rows);

}  // namespace phub
