// The messages of the calls about a job's branches. branches.md documents them.
//
// A job whose spec has `branches` may be forked between two rounds: the child has the parameters
// and the optimizer's states of its parent, and hyperparameters of its own. One branch runs in each
// round, for all ranks. Decisions about branches and hyperparameters hold from rounds that do not
// descend: each decision is for the round of the one before it, or a later one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

inline constexpr size_t kMostBranchTurns = 256;  // in one request
inline constexpr size_t kMostBranchRuns = 1024;  // runs that are still to come
inline constexpr size_t kMostBranchMoves = 2 * kMostBranchRuns;
inline constexpr size_t kMostBranchForks = 2 * kMostBranchRuns;
inline constexpr size_t kMostBatchRuns = 1u << 16;
inline constexpr uint32_t kMostKilledBranches = 255;  // limit of a job at a time

enum class BranchAction : uint8_t { kList, kFork, kSchedule, kDiscard, kKill, kRevive };

struct BranchTurn {
  uint32_t branch = 0;
  uint64_t rounds = 0;  // so many; 0, only in the last turn: until another schedule

  friend bool operator==(const BranchTurn&, const BranchTurn&) = default;
};

// A decision about branches. It changes the state with which rounds begin from `round` on: the
// first that no chunk can have begun with something else, if that is later, or the round of the
// latest decision.
struct BranchChange {
  BranchAction action = BranchAction::kList;
  uint64_t round = 0;
  uint32_t branch = 0;                        // fork: the parent; discard, kill, revive: which
  std::map<std::string, double> values = {};  // fork: hyperparameters that differ from the parent's
  std::vector<BranchTurn> turns = {};         // schedule: one after the other
  bool is_loaded = false;  // revive: the content of its files is in memory; no part of a request

  friend bool operator==(const BranchChange&, const BranchChange&) = default;
};

// POST …/branches
struct BranchRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  BranchAction action = BranchAction::kList;
  uint64_t round = 0;
  uint32_t branch = 0;
  std::map<std::string, double> values = {};
  std::vector<BranchTurn> turns = {};
};

struct BranchRun {
  uint64_t round = 0;  // from this one on, until the next in the list
  uint32_t branch = 0;

  friend bool operator==(const BranchRun&, const BranchRun&) = default;
};

// At the beginning of `round`, `branch` became a copy of `parent`. Either may be discarded by now.
struct BranchFork {
  uint64_t round = 0;
  uint32_t branch = 0;
  uint32_t parent = 0;

  friend bool operator==(const BranchFork&, const BranchFork&) = default;
};

// A branch that was discarded, and runs in a round that is in progress or to come, with values as
// BranchStatus has them: some ranks may have begun that round with them.
struct BranchGone {
  uint32_t branch = 0;
  std::map<std::string, double> values = {};

  friend bool operator==(const BranchGone&, const BranchGone&) = default;
};

// The hyperparameter `batch` of the branch that runs.
struct BatchRun {
  uint64_t round = 0;  // from this one on, until the next in the list
  uint64_t batch = 0;

  friend bool operator==(const BatchRun&, const BatchRun&) = default;
};

// A move of the chunks' states before a round: in checkpoints, and between boxes
// (phub/core/branch_orders.h).
struct BranchMove {
  uint64_t round = 0;
  bool copies = false;  // else the running branch and the one on the shelf `to` change places
  uint32_t from = 0;    // 0: the running branch; else a shelf, or the files of a branch for `to`
  uint32_t to = 0;
  uint32_t child = 0;  // copies: the branch that is made, or revived

  friend bool operator==(const BranchMove&, const BranchMove&) = default;
};

// The branches after all decisions so far, and the decisions for each round from the one in
// progress on. If a rank has the result with which a round begins, everything about that round is
// decided.
struct BranchReply {
  uint64_t round = 0;                       // the decision holds from this round; list: 0
  uint32_t branch = 0;                      // fork: the child
  std::vector<BranchStatus> branches = {};  // ascending
  std::vector<BranchRun> runs = {};         // ascending rounds, as in the other two
  std::vector<BranchFork> forks = {};       // in their order within a round: a child may have a
                                            // child
  std::vector<BatchRun> batches = {};
  std::vector<BranchGone> gone = {};  // ascending; only in a job without an optimizer

  friend bool operator==(const BranchReply&, const BranchReply&) = default;
};

}  // namespace phub
