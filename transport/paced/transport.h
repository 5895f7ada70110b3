// Budgets of NICs around any transport that has NICs: the box's side, and a worker's.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/paced/nic_budget.h"
#include "transport/transport.h"

namespace phub {

// The box: each NIC sends at most so many bytes per second. Cores share nothing: each holds the
// part of a NIC's budget that its chunks are of those of all open jobs on that NIC. What a core
// does not use of its part, no other does. Throws Error(kInvalid) for a transport that shares
// memory.
std::unique_ptr<Transport> make_paced(std::unique_ptr<Transport> transport, NicBudget budget);

// A worker of one thread: each of its NICs (WorkerLink::nic_of) sends at most so many bytes per
// second. Throws Error(kInvalid) for a link that shares memory.
std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, uint32_t queues,
                                       NicBudget budget);

}  // namespace phub
