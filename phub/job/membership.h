// Who takes part in a job, from which round on: a pure state machine.
//
// It is fed decoded requests, reports of the cores and the time, and answers with actions for the
// server to carry out in order. No sockets, threads or clocks: the simulator runs the same code.
// One mechanism changes anything, the boundary of core/messages.h; at most one is in progress.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/job/branches.h"
#include "phub/job/membership_log.h"
#include "phub/plan/choices.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

struct MembershipAction {
  enum Type {
    kHold,    // send kHold to every core
    kAdmit,   // make the memory and queue pairs of `rank`/`incarnation`, which may take its time;
              // then call admitted()
    kCommit,  // send kCommit with boundary() to every core, with the changes in `hyper` and
              // `orders`
    kRevoke,  // close the connection of `rank` and give its memory back
    kReply,   // answer the request `token`
    kFail,    // the job ends with an error: code, message
    kSave,    // the last rank has left: save the job, then call end_saved()
    kEnd,     // the last rank has left, and the job is over
  };
  Type type = kHold;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t token = 0;         // kAdmit: of the join
  uint64_t first_round = 0;   // kReply to a join; to a change: the round that it holds from
  bool send_initial = false;  // kReply to a join
  bool ok = true;             // kReply
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::vector<HyperChange> hyper;   // kCommit: ascending, from boundary().round on or later
  std::vector<BranchOrder> orders;  // kCommit: ascending, for rounds after boundary().round
  uint64_t lowest_round = 0;        // kCommit: that a chunk is in
};

class Membership {
 public:
  using Ms = uint64_t;  // monotonic milliseconds

  // The first join begins the time in which all first ranks must come (join_limit_ms).
  // `served`: the ranks that this box has; the others are at other racks. `spec` outlives this.
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks, const RankRange& served);
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks)
      : Membership(spec, cores, chunks, {0, spec.max_ranks}) {}
  // The job goes on from a checkpoint: the ranks that it names as expected are its first. `clocks`:
  // what its chunks have of each rank, if it is not in lock-step. Before anything else is called.
  void restore(const Manifest& saved, const SavedClocks& clocks = {});

  // Of a rack, which is this incarnation at its parent: its ranks are others than those of its
  // incarnations before, and have higher numbers. Before anything else is called.
  void begin_life(uint32_t incarnation);

  // Requests; `token` comes back in a kReply.
  void join(uint64_t token, int32_t rank, bool replace, Ms now);
  void leave(uint64_t token, uint32_t rank);
  void barrier(uint64_t token, uint32_t rank);
  void leave_barrier(uint32_t rank);  // it waits there no more, if it did
  // From `round` on, if it is given, or the first round after it that no chunk has completed and
  // that no change was made beyond. What other ranks have set for that round must be the same, and
  // is then one change.
  void set_hyper(uint64_t token, uint32_t rank, const HyperChange& change);
  // In a job that may have branches: not before the round after the next boundary's. The answer to
  // a fork is about branch `child`, from new_branch(). REQUIRES: it is no kList.
  void change_branches(uint64_t token, const BranchChange& change, uint32_t child);
  uint32_t new_branch() { return branches_.next(); }
  // All that was decided. Of the round behind any result that somebody has, it is known what runs.
  const Branches& branches() const { return branches_; }
  void saved_durably(uint64_t round) { branches_.saved_durably(round); }
  // At a boundary of its own, or with what waits for one. False: the job has not begun, or has
  // ended.
  bool take_snapshot();
  bool move_state();  // the same for the state of keys that is read or set
  // It is wanted, and its boundary is not made yet: it will have all rounds that are complete now.
  bool awaits_snapshot() const {
    return snapshot_wanted_ || (boundary_.snapshot && phase_ == Phase::kHolding);
  }
  // What the last rank leaves is to be saved (kSave) before the job ends. Nobody joins meanwhile.
  void save_at_end() { save_at_end_ = true; }
  void end_saved();
  // A snapshot is being copied: what was decided for rounds from there on is still to be saved;
  // kNever: none is.
  void keep_from(uint64_t round) { keep_from_ = round; }
  // Some cores may be behind the boundary under way already: what it changes is not in the log yet.
  bool is_committing() const { return phase_ == Phase::kCommitting; }
  // What a checkpoint keeps of the members, once every core has copied its chunks as they were
  // after `round`: what was decided since then is void when it is restored.
  // REQUIRES: !is_committing()
  Manifest saved(uint64_t round);

  // Renews the lease. REQUIRES: is_current(rank, incarnation).
  void heartbeat(uint32_t rank, Ms now);
  bool is_current(uint32_t rank, uint32_t incarnation) const;
  // Current, and nothing is under way to change that.
  bool is_secure(uint32_t rank, uint32_t incarnation) const;
  // Why an incarnation is no longer current: "lease expired", …
  std::string why_not_current(uint32_t rank, uint32_t incarnation) const;
  // The same of one that was lost; "" of all others.
  std::string why_lost(uint32_t rank, uint32_t incarnation) const;

  // What happens to ranks and cores.
  void admitted(uint32_t rank, bool ok, const std::string& message);
  void disconnected(uint32_t rank, uint32_t incarnation, const std::string& reason);
  // A core, a device or a box can do no more for the job.
  void failed(const std::string& reason, ErrorCode code = ErrorCode::kInternal);
  void held(const CoreReport& report, Ms now);
  void committed(const CoreReport& report, Ms now);
  void non_finite(uint32_t rank, const std::string& where);
  static std::string non_finite_text(uint32_t rank, const std::string& where);
  void excluded(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round);
  // After every core answered a probe: the lowest round in progress, how much has come of each
  // rank, ever, in whatever pieces, and missing ranks.
  void probed(uint64_t min_round, const std::vector<uint64_t>& sent,
              const std::vector<uint64_t>& waited_for, Ms now);
  void tick(Ms now);
  void remove();  // somebody deleted the job
  // The parent's job has ended, or this rack is no longer in it.
  void parent_ended(ErrorCode code, const std::string& reason) { fail_job(code, reason); }

  std::deque<MembershipAction>& actions() { return actions_; }
  Boundary& boundary() { return boundary_; }

  MembershipLog& log() { return log_; }
  const MembershipLog& log() const { return log_; }
  std::vector<RankStatus> ranks() const;
  std::vector<uint32_t> missing() const;      // expected ranks that are not live
  std::vector<uint32_t> waiting_for() const;  // as the last probe saw it
  std::string state() const;
  uint64_t completed_round() const { return min_round_ == 0 ? 0 : min_round_ - 1; }
  // No chunk is in an earlier one, also of those that nobody is waited for at.
  uint64_t lowest_round() const { return lowest_round_; }
  // The highest that an incarnation of the rank which is lost took part in; 0: none.
  uint64_t last_round(uint32_t rank) const { return ranks_[rank].last_round; }
  bool assembled() const { return assembled_; }  // all first ranks were there at one time
  // Of the boundary that is committed: the highest round that any contribution had come for.
  uint64_t started() const { return started_; }

 private:
  enum class State { kAbsent, kJoining, kLive, kLost, kLeft };
  struct Rank {
    State state = State::kAbsent;
    uint32_t incarnation = 0;
    uint64_t first_round = 0;
    uint64_t last_round = 0;  // the highest that its lost predecessor took part in
    bool expected = false;    // the cores wait for it, live or not
    bool first = false;       // one of those that the job begins with
    bool losing = false;      // its loss is pending or under way
    Ms lease_until = 0;
    Ms waited_since = 0;  // 0: nobody waits
    uint64_t sent = 0;    // as probed() was told last
    std::string reason;
  };
  struct Loss {
    uint32_t rank;
    bool left;  // it asked to go
    std::string reason;
    uint64_t leave_token;
    bool lost = true;  // the policy applies: it did not ask, or the job had not begun
  };
  struct Join {
    uint64_t token;
    uint32_t rank;
    // Until its predecessor is gone from every core; until it has been admitted; for a boundary.
    enum { kWaiting, kAdmitting, kAdmitted } stage = kWaiting;
    State before = State::kAbsent;  // what the rank was, in case its admission fails
  };
  struct Hyper {
    uint64_t token;
    uint32_t rank;
    HyperChange change;
    bool is_new = true;  // something of it was not set by another rank
  };
  struct OfBranches {
    uint64_t token;
    BranchChange change;
    uint32_t child;
    std::vector<LogRecord> records = {};
  };
  struct SetValue {
    double value;
    uint32_t rank;  // that set it; kSeveral: more than one
  };

  // membership_boundary.cc
  void admit_waiting();
  void advance();
  void build_boundary();
  void place_changes();
  uint64_t first_unbegun_round() const;
  void place_branches(MembershipAction& commit);
  std::string difference_of(const Hyper& hyper) const;
  void remember(Hyper& hyper);
  uint64_t expected_again(const Loss& loss) const;
  void finish_losses();
  void finish_joins(Ms now);
  void check_assembled();
  void after_losses(Ms now);
  void check_abandoned();

  // membership_saved.cc
  void restore_log(const Manifest& saved, const SavedClocks& clocks);
  void restore_excluded(LogRecord record, const SavedClocks& clocks);

  // membership.cc
  void lose(uint32_t rank, const std::string& reason, bool left = false, uint64_t token = 0);
  void forget(uint32_t rank, const std::string& reason);
  void check_join_limit(Ms now);
  void check_barrier();
  void check_limits(Ms now);
  void fail_job(ErrorCode code, const std::string& message);
  void finish(ErrorCode code, const std::string& message);
  void reply(uint64_t token);
  void reply_error(uint64_t token, ErrorCode code, const std::string& message);
  int32_t choose_rank() const;
  bool is_joining(uint32_t rank) const;
  uint32_t live() const;
  uint32_t first_ranks() const;

  const JobSpec& spec_;
  const Choices choices_;
  const uint32_t cores_;
  const uint32_t chunks_;
  const RankRange served_;
  std::vector<Rank> ranks_;
  MembershipLog log_;
  std::deque<MembershipAction> actions_;

  // Waiting for a boundary.
  std::vector<Loss> losses_;
  std::vector<Join> joins_;
  std::vector<Hyper> hypers_;
  std::vector<OfBranches> of_branches_;
  std::vector<uint32_t> forgotten_;
  bool snapshot_wanted_ = false;
  bool state_wanted_ = false;
  bool save_at_end_ = false;  // and that is not done yet
  bool saving_end_ = false;   // it is being done
  bool has_begun() const { return assembled_ && min_round_ > 0 && !finished_; }
  std::vector<SavedRank> beyond_;  // ranks that a job had which goes on with fewer
  bool restored_ = false;

  // The boundary under way.
  enum class Phase { kIdle, kHolding, kCommitting } phase_ = Phase::kIdle;
  uint32_t answers_ = 0;
  uint64_t started_ = 0;
  uint64_t held_min_round_ = 0;  // the lowest that a chunk is in; as CoreReport has it
  uint64_t held_lowest_ = 0;     // and that of all chunks
  uint64_t lowest_round_ = 0;    // the same, at the latest boundary
  uint64_t keep_from_ = kNever;
  uint64_t committed_min_round_ = 0;  // and after the latest boundary
  Boundary boundary_;
  std::vector<Loss> current_losses_;
  std::vector<Join> current_joins_;
  std::vector<Hyper> current_hypers_;
  std::vector<OfBranches> current_of_branches_;
  std::vector<std::vector<uint64_t>> last_rounds_;

  uint64_t last_change_ = 0;                        // the round that the latest change holds from
  std::map<std::string, SetValue> of_last_change_;  // all that was set from that round on
  Branches branches_;
  std::map<uint32_t, uint64_t> barrier_;  // rank → token
  uint64_t min_round_ = 0;
  std::vector<uint64_t> waited_for_;
  bool assembled_ = false;
  Ms assemble_until_ = 0;  // 0: nobody has come yet
  bool finished_ = false;
  bool failed_ = false;
  std::optional<Error> failing_;  // as soon as the boundary under way is complete
  Ms now_ = 0;
  Ms check_limits_after_ = kNever;  // no lease or time without progress ends before
  // Policies wait and fail: the job pauses before a round.
  Ms pause_until_ = 0;            // 0: not paused
  uint64_t fail_after_ = kNever;  // policy fail: once this round is complete
  std::string fail_message_;
};

}  // namespace phub
