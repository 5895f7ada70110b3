// The number by which boxes and ranks of one machine know each other.
#pragma once

#include <cstdint>

namespace phub::numa {

// The machine and its network, as this process sees them: processes with the same number reach
// each other without a NIC. Two containers of one machine have two numbers, unless they share the
// network. The same until the machine starts anew. 0: unknown, where /proc does not say it.
uint64_t this_host();

}  // namespace phub::numa
