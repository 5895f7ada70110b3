// What a job does while ranks are missing: it waits for its first ranks up to the join limit, and
// for a lost rank as its policy (on_loss) says. Part of Membership; it is told the time, and has no
// threads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phub/core/messages.h"
#include "phub/job/job_rounds.h"
#include "phub/job/rank_table.h"
#include "phub/job_rules.h"
#include "transport/error.h"

namespace phub {

// A rank that the next boundary takes out, or that the latest has taken out.
struct RankLoss {
  uint32_t rank;
  bool left;  // it asked to leave
  std::string reason;
  uint64_t leave_token;
  bool lost = true;  // the policy applies: it did not ask, or the job had not begun
};

class LossPolicy {
 public:
  using Ms = uint64_t;  // monotonic milliseconds

  LossPolicy(const JobSpec& spec, const RankTable& ranks, const JobRounds& rounds);

  // A rank joins. The first join begins the time in which all first ranks must come.
  void joined(Ms now);
  bool join_limit_is_over(Ms now) const;
  // The join limit is over, and these ranks have not come. Returns the error that the job ends
  // with; nullopt: it begins without them.
  std::optional<Error> without(const std::vector<uint32_t>& absent) const;
  std::string why_absent() const;

  // Every expected rank is there.
  void all_are_there();
  bool assembled() const { return assembled_; }  // all first ranks were there at one time

  // The first round that the cores do not complete without a successor of the rank.
  uint64_t expected_again(const RankLoss& loss, uint64_t boundary_round) const;
  // The boundary before `round` has taken these out. Returns the error that the job ends with now.
  std::optional<Error> lost(std::span<const RankLoss> losses, uint64_t round, Ms now);

  // Nothing is to be completed without a rank that is lost now.
  bool stops() const { return on_loss_ == OnLoss::kStop && assembled_; }
  static std::string lost_text(uint32_t rank, uint32_t incarnation, const std::string& reason);

  // The job is about to end with an error, once the round in progress is complete.
  bool is_failing() const { return fail_after_ != kNever; }
  bool is_paused() const { return pause_until_ != 0; }
  // The error that the job ends with now. `idle`: no boundary is under way.
  std::optional<Error> overdue(Ms now, bool idle) const;

 private:
  const JobSpec& spec_;
  const OnLoss on_loss_;
  const RankTable& ranks_;
  const JobRounds& rounds_;
  bool assembled_ = false;
  Ms assemble_until_ = 0;  // 0: no rank has come yet
  // Policies wait and fail: the job pauses before a round.
  Ms pause_until_ = 0;            // 0: not paused
  uint64_t fail_after_ = kNever;  // policy fail: once this round is complete
  std::string fail_message_;
};

}  // namespace phub
