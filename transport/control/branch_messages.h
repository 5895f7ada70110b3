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

// What the chunks do before a round: in checkpoints, and between boxes (phub/core/branch_orders.h).
struct BranchMove {
  uint64_t round = 0;
  bool copies = false;  // else what runs and what is on the shelf `to` change places
  uint32_t from = 0;    // 0: what runs; else a shelf, or the files of what is to be on `to`
  uint32_t to = 0;
  uint32_t child = 0;  // copies: the branch that is made, or revived

  friend bool operator==(const BranchMove&, const BranchMove&) = default;
};

// What there is when everything is done that was decided.
struct BranchReply {
  uint64_t round = 0;                       // from which it holds; list: 0
  uint32_t branch = 0;                      // fork: the child
  std::vector<BranchStatus> branches = {};  // ascending
  // Ascending, from the round in progress on: it tells of every round that begins with a result
  // which somebody has; of later ones as far as it is decided.
  std::vector<BranchRun> runs = {};

  friend bool operator==(const BranchReply&, const BranchReply&) = default;
};

}  // namespace phub
