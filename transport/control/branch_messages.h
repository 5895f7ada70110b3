// The messages of the calls about a job's branches. transport/README.md documents them.
//
// A job whose spec has `branches` may be forked between two rounds: the child has the parameters
// and the optimizer's states of its parent, and hyperparameters of its own. One branch runs in each
// round, for all ranks. What is decided about branches and hyperparameters holds from rounds that
// do not descend: each decision is for the round of the one before it, or a later one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

inline constexpr size_t kMostBranchTurns = 256;  // in one request
inline constexpr size_t kMostBranchRuns = 1024;  // that are still to come
inline constexpr size_t kMostBranchMoves = 2 * kMostBranchRuns;
inline constexpr size_t kMostBranchForks = 2 * kMostBranchRuns;
inline constexpr size_t kMostBatchRuns = 1u << 16;
inline constexpr uint32_t kMostKilledBranches = 255;  // of a job at a time

enum class BranchAction : uint8_t { kList, kFork, kSchedule, kDiscard, kKill, kRevive };

struct BranchTurn {
  uint32_t branch = 0;
  uint64_t rounds = 0;  // for so many; 0, of the last turn: until another is scheduled

  friend bool operator==(const BranchTurn&, const BranchTurn&) = default;
};

// What is to be done. It changes what rounds begin with from `round` on: the first that no chunk
// can have begun with something else, if that is later, or the round of the latest decision.
struct BranchChange {
  BranchAction action = BranchAction::kList;
  uint64_t round = 0;
  uint32_t branch = 0;                        // fork: the parent; discard, kill, revive: which
  std::map<std::string, double> values = {};  // fork: hyperparameters that differ from the parent's
  std::vector<BranchTurn> turns = {};         // schedule: one after the other
  bool is_loaded = false;  // revive: what its files have is in memory; no part of a request

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

// Before the round `branch` became a copy of `parent`. Either may be discarded by now.
struct BranchFork {
  uint64_t round = 0;
  uint32_t branch = 0;
  uint32_t parent = 0;

  friend bool operator==(const BranchFork&, const BranchFork&) = default;
};

// The hyperparameter `batch` of the branch that runs.
struct BatchRun {
  uint64_t round = 0;  // from this one on, until the next in the list
  uint64_t batch = 0;

  friend bool operator==(const BatchRun&, const BatchRun&) = default;
};

// What the chunks do before a round: in checkpoints, and between boxes (phub/core/branch_orders.h).
struct BranchMove {
  uint64_t round = 0;
  bool copies = false;  // else what runs and what is on the shelf `to` change places
  uint32_t from = 0;    // 0: what runs; else a shelf, or the files of what is to be on `to`
  uint32_t to = 0;
  uint32_t child = 0;  // copies: the branch that is made, or revived

  friend bool operator==(const BranchMove&, const BranchMove&) = default;
};

// What there is when everything is done that was decided; and of each round from the one in
// progress on, what is decided of it. All is known of a round that begins with a result which
// somebody has.
struct BranchReply {
  uint64_t round = 0;                       // from which it holds; list: 0
  uint32_t branch = 0;                      // fork: the child
  std::vector<BranchStatus> branches = {};  // ascending
  std::vector<BranchRun> runs = {};         // ascending rounds, as in the other two
  std::vector<BranchFork> forks = {};       // of one round in their order: a child may have a child
  std::vector<BatchRun> batches = {};

  friend bool operator==(const BranchReply&, const BranchReply&) = default;
};

}  // namespace phub
