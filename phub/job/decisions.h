// The decisions of a job that hold from a round on: values of hyperparameters, and branches that
// are forked, run, killed or revived. A decision that is asked for waits for a boundary
// (core/messages.h), which gives it its round. Part of Membership; no threads.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/core/branch_orders.h"
#include "phub/job/branches.h"
#include "phub/job/membership_log.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

class Decisions {
 public:
  explicit Decisions(const JobSpec& spec);  // outlives this

  // `token` comes back in an answer. The change holds from `round` on, or from the first later
  // round that no chunk has completed and that is not below the round of the latest decision.
  // Values that other ranks set for that round must be the same; together they are one change.
  void ask(uint64_t token, uint32_t rank, const HyperChange& change) {
    hypers_.waiting.push_back({token, rank, change});
  }
  // In a job that may have branches: the change holds at the earliest from the round after the next
  // boundary's. A fork makes branch `child`. REQUIRES: the change is no kList.
  void ask(uint64_t token, const BranchChange& change, uint32_t child) {
    of_branches_.waiting.push_back({token, change, child});
  }

  // The next boundary begins: it takes all that wait. False: there are none.
  bool begin();
  struct Answer {
    uint64_t token = 0;
    uint64_t round = 0;            // from which the decision holds
    std::optional<Error> refused;  // then nothing has changed
  };
  struct Rounds {
    uint64_t boundary = 0;
    uint64_t first_unbegun = 0;  // no rank has begun it, nor asked for its batch
    uint64_t lowest = 0;         // of all chunks
  };
  struct Placed {
    std::vector<HyperChange> hyper;   // ascending, from the boundary's round on
    std::vector<BranchOrder> orders;  // ascending, for later rounds
    std::vector<Answer> refused;
  };
  // Gives each decision of the boundary its round: complete rounds stay as they were, and so do
  // earlier decisions.
  Placed place(const Rounds& rounds);
  // The boundary is complete: writes its decisions into the log.
  std::vector<Answer> finish(MembershipLog& log);
  // Drops all that wait, also for the boundary under way. Returns their tokens.
  std::vector<uint64_t> drop();

  // All decisions about branches so far. The branch of the round after any result that some rank
  // has is final.
  Branches& branches() { return branches_; }
  const Branches& branches() const { return branches_; }

  // The job goes on from this checkpoint, in which some chunks have rounds up to `latest`, by rank.
  void restore(const Manifest& saved, const std::vector<uint64_t>& latest);
  void save(Manifest& saved, uint64_t round) const { saved.branches = branches_.saved(round); }
  // The log has this record: if it is a decision, no later one holds from an earlier round.
  void note(const LogRecord& record);

 private:
  struct Hyper {
    uint64_t token;
    uint32_t rank;
    HyperChange change;
    bool is_new = true;  // no other rank set all of it before
  };
  struct OfBranches {
    uint64_t token;
    BranchChange change;
    uint32_t child;
    std::vector<LogRecord> records = {};
  };
  template <typename T>
  struct Queue {
    std::vector<T> waiting;  // for a boundary
    std::vector<T> current;  // of the boundary under way
  };
  struct SetValue {
    double value;
    uint32_t rank;  // the rank that set it; kSeveral: more than one
  };

  void place(Hyper& hyper, const Rounds& rounds);             // throws Error
  void place(OfBranches& of, const Rounds& rounds, Placed&);  // throws Error
  void check_distance(uint64_t round, const Rounds& rounds) const;
  void check_same(const Hyper& hyper) const;
  void remember(Hyper& hyper);
  void note(uint64_t round) { last_ = std::max(last_, round); }

  const JobSpec& spec_;
  Queue<Hyper> hypers_;
  Queue<OfBranches> of_branches_;
  uint64_t last_ = 0;                        // the first round of the latest decision
  std::map<std::string, SetValue> of_last_;  // its values
  Branches branches_;
};

}  // namespace phub
