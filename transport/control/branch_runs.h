// Reads a BranchReply for a round (branch_messages.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/error.h"

namespace phub {

// The entry of `runs` or `batches` that holds in the round: the latest up to it. Throws
// Error(kNotFound).
template <typename Run>
const Run& run_in(const std::vector<Run>& runs, uint64_t round) {
  const auto after = std::ranges::upper_bound(runs, round, {}, &Run::round);
  if (after != runs.begin()) return *std::prev(after);
  fail(ErrorCode::kNotFound, "what was decided of round {} is forgotten: the job is in round {}",
       round, runs.empty() ? 0 : runs.front().round);
}

// The branches that may run, or be forked, after the round has begun.
inline std::set<uint32_t> needed_after(uint64_t round, const BranchReply& all) {
  std::set<uint32_t> needed;
  for (const BranchStatus& each : all.branches) needed.insert(each.branch);
  for (const BranchRun& run : all.runs) {
    if (run.round > round) needed.insert(run.branch);
  }
  for (const BranchFork& fork : all.forks) {
    if (fork.round > round) needed.insert(fork.parent);
  }
  return needed;
}

// The branches among these that are forked by then, but for the one that runs in the round.
inline std::set<uint32_t> waiting_in(uint64_t round, const BranchReply& all) {
  std::set<uint32_t> waiting = needed_after(round, all);
  for (const BranchFork& fork : all.forks) {
    if (fork.round > round) waiting.erase(fork.branch);
  }
  waiting.erase(run_in(all.runs, round).branch);
  return waiting;
}

}  // namespace phub
