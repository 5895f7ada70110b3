// The changes of a job, of its members and by decisions (decisions.h): each is asked for, waits for
// a boundary (core/messages.h), is carried out by it, and is written into the log. At most one
// boundary is in progress. Part of Membership; no threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/job/decisions.h"
#include "phub/job/joins.h"
#include "phub/job/members.h"
#include "transport/error.h"

namespace phub {

class Changes {
 public:
  // `members` outlive this.
  Changes(Members& members, uint32_t cores, uint32_t chunks);
  void restore(const Manifest& saved, const SavedClocks& clocks);

  // Requests. Each begins a boundary, or waits for the one after that under way. `token` comes back
  // in a kReply.
  void join(uint64_t token, uint32_t rank);
  void leave(uint64_t token, uint32_t rank) { lose(rank, "left", true, token); }
  void lose(uint32_t rank, const std::string& reason) { lose(rank, reason, false, 0); }
  // Ranks that are expected but not there are not waited for any longer.
  void forget(std::span<const uint32_t> ranks, const std::string& reason);
  // As Decisions::ask(), at the next boundary.
  template <typename... Asked>
  void decide(const Asked&... asked) {
    decisions_.ask(asked...);
    advance();
  }
  // The next boundary has this, too: `snapshot`, or the like. Returns false if the job has not
  // begun, or has ended.
  bool ask(bool Boundary::*what, bool runs = false);  // `runs`: it is known to have begun
  // A snapshot is wanted, and its boundary is not made yet: it will have all rounds that are
  // complete now.
  bool awaits_snapshot() const {
    return next_.snapshot || (boundary_.snapshot && phase_ == Phase::kHolding);
  }

  // The memory and queue pairs of a rank that joins are made, or not.
  void admitted(uint32_t rank, bool ok, const std::string& why);
  void held(const CoreReport& report);
  // Returns whether the boundary is complete; the next one begins with advance().
  bool committed(const CoreReport& report, uint64_t now);
  void advance();  // begins a boundary when something waits for one
  // The job has ended: answers all that wait, and begins no boundary any more.
  void close(ErrorCode code, const std::string& message);
  // Why a standby has lost its source (standby.h); "": it has not.
  const std::string& source_lost() const { return source_lost_; }

  Decisions& decisions() { return decisions_; }
  Boundary& boundary() { return boundary_; }
  std::span<const RankLoss> losses() const { return current_losses_; }  // of the latest boundary
  bool is_idle() const { return phase_ == Phase::kIdle; }               // none is under way
  bool nothing_waits() const { return is_idle() && losses_.empty() && !joins_.wait(); }
  // Some cores may be past the boundary under way already, whose changes are not in the log yet.
  bool is_committing() const { return phase_ == Phase::kCommitting; }
  // All first ranks were there, with the initial parameters, and the job has not ended.
  bool job_runs() const;

 private:
  void lose(uint32_t rank, const std::string& reason, bool left, uint64_t token);
  void build_boundary();
  uint64_t first_unbegun_round() const;
  void finish_losses();
  void finish_joins(uint64_t now);

  Members& members_;
  RankTable& ranks_;
  MembershipActions& actions_;
  const uint32_t cores_;
  const uint32_t chunks_;

  // Waiting for a boundary.
  Joins joins_;
  Decisions decisions_;
  std::vector<RankLoss> losses_;
  Boundary next_;  // as far as it was asked for
  bool has_next_ = false;
  bool closed_ = false;
  bool is_stopping_ = false;  // by its policy
  std::string source_lost_;

  // The boundary under way.
  enum class Phase { kIdle, kHolding, kCommitting } phase_ = Phase::kIdle;
  uint32_t answers_ = 0;
  Boundary boundary_;
  std::vector<RankLoss> current_losses_;
  std::vector<std::vector<uint64_t>> last_rounds_;
};

}  // namespace phub
