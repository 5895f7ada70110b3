// What an order of the server comes to on this machine: the plan of a part, and what it goes on
// from. Every number in an order is checked here or in served_part.cc before it is used.
#pragma once

#include <algorithm>
#include <span>
#include <string_view>

#include "phub/job/job_part.h"
#include "phub/machine.h"
#include "phub/plan/plan.h"
#include "transport/control/shard_messages.h"

namespace phub {

// Throws Error(kInvalid) that names what does not fit.
[[noreturn]] void refuse_order(std::string_view what);

// Throws Error(kInvalid).
Plan plan_of(const ShardPart& order, const Machine& machine);
// What a part needs of the checkpoint that its job goes on from. Throws Error(kInvalid).
Manifest manifest_of(const ShardRestored& restored, const JobSpec& spec);

// The moves name shelves that a job like `spec` has. `has_dock(shelf)`: a branch lies in the dock
// of that shelf, from which a move may copy.
template <typename HasDock>
bool fit(std::span<const BranchMove> moves, const JobSpec& spec, const HasDock& has_dock) {
  return std::ranges::all_of(moves, [&](const BranchMove& move) {
    if (move.from > spec.branches) {
      return move.copies && move.to > 0 && move.to <= spec.branches &&
             move.from == spec.branches + move.to && has_dock(move.to);
    }
    return move.to <= spec.branches && (!move.copies || move.from != move.to);
  });
}

}  // namespace phub
