// Budgets of NICs around any transport that has NICs: the box's side, a worker's, and that of a
// rack to its parent.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/paced/nic_budget.h"
#include "transport/paced/shares.h"
#include "transport/transport.h"

namespace phub {

// The box: each NIC sends at most so many bytes per second, of which each core has its share
// (shares.h). Throws Error(kInvalid) for a transport that shares memory.
std::unique_ptr<Transport> make_paced(std::unique_ptr<Transport> transport, NicBudget budget);

// A worker of one thread: each of its NICs (WorkerLink::nic_of) sends at most so many bytes per
// second. Throws Error(kInvalid) for a link that shares memory.
std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, uint32_t queues,
                                       NicBudget budget);

// A rack's link to its parent, polled by the layout's threads: each of its NICs sends at most so
// many bytes per second, of all links with these shares together. `shares` outlives it. Throws
// Error(kInvalid) for a link that shares memory.
std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, const LinkLayout& layout,
                                       BudgetShares& shares);

}  // namespace phub
