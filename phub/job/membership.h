// The ranks that take part in a job, and from which round on: a pure state machine.
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
#include "phub/job/decisions.h"
#include "phub/job/membership_log.h"
#include "phub/job_rules.h"
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
  uint64_t token = 0;         // kAdmit: the join's
  uint64_t first_round = 0;   // kReply to a join, or to a change: the round from which it holds
  bool send_initial = false;  // kReply to a join
  bool ok = true;             // kReply
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::vector<HyperChange> hyper;   // kCommit: ascending, from boundary().round on or later
  std::vector<BranchOrder> orders;  // kCommit: ascending, for rounds after boundary().round
  uint64_t lowest_round = 0;        // kCommit: the lowest that a chunk is in
};

class Membership {
 public:
  using Ms = uint64_t;  // monotonic milliseconds

  // The first join begins the time in which all first ranks must come (join_limit_ms).
  // `served` are the ranks of this box; the others are at other racks. `spec` outlives this.
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks, const RankRange& served);
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks)
      : Membership(spec, cores, chunks, {0, spec.max_ranks}) {}
  // The job goes on from a checkpoint: the ranks that it names as expected are its first. `clocks`
  // has the round of each rank's last update to each chunk, if the job is not in lock-step.
  // REQUIRES: no other call came before.
  void restore(const Manifest& saved, const SavedClocks& clocks = {});

  // The job is a rack's, which is this incarnation at its parent: the incarnations of its ranks get
  // higher numbers than in the rack's lives before. REQUIRES: no other call came before.
  void begin_life(uint32_t incarnation);

  // Requests; `token` comes back in a kReply.
  void join(uint64_t token, int32_t rank, bool replace, Ms now);
  void leave(uint64_t token, uint32_t rank);
  void barrier(uint64_t token, uint32_t rank);
  void leave_barrier(uint32_t rank);  // it no longer waits there, if it did
  // These ask for a decision (decisions.h) at the next boundary.
  void set_hyper(uint64_t token, uint32_t rank, const HyperChange& change);
  void change_branches(uint64_t token, const BranchChange& change, uint32_t child);
  Branches& branches() { return decisions_.branches(); }
  const Branches& branches() const { return decisions_.branches(); }
  // At a boundary of its own, or with other changes that wait for one. Returns false if the job has
  // not begun, or has ended.
  bool take_snapshot();
  bool move_state();  // the same for the state of keys that is read or set
  // A snapshot is wanted, and its boundary is not made yet: it will have all rounds that are
  // complete now.
  bool awaits_snapshot() const {
    return snapshot_wanted_ || (boundary_.snapshot && phase_ == Phase::kHolding);
  }
  // When the last rank leaves, the job is to be saved (kSave) before it ends. No rank joins
  // meanwhile.
  void save_at_end() { save_at_end_ = true; }
  void end_saved();
  // A snapshot is being copied, which is still to save the decisions for rounds from `round` on;
  // kNever: none is.
  void keep_from(uint64_t round) { keep_from_ = round; }
  // Some cores may be past the boundary under way already, whose changes are not in the log yet.
  bool is_committing() const { return phase_ == Phase::kCommitting; }
  // The members for a checkpoint, once every core has copied its chunks as they were after `round`:
  // later decisions are void when it is restored.
  // REQUIRES: !is_committing()
  Manifest saved(uint64_t round);

  // Renews the lease. REQUIRES: is_current(rank, incarnation).
  void heartbeat(uint32_t rank, Ms now);
  bool is_current(uint32_t rank, uint32_t incarnation) const;
  // The incarnation is current, and no change of that is under way.
  bool is_secure(uint32_t rank, uint32_t incarnation) const;
  // The reason why an incarnation is no longer current: "lease expired", …
  std::string why_not_current(uint32_t rank, uint32_t incarnation) const;
  // The reason of a lost incarnation; "" for all others.
  std::string why_lost(uint32_t rank, uint32_t incarnation) const;

  // Events of ranks and cores.
  void admitted(uint32_t rank, bool ok, const std::string& message);
  void disconnected(uint32_t rank, uint32_t incarnation, const std::string& reason);
  // A core, a device or a box can no longer serve the job.
  void failed(const std::string& reason, ErrorCode code = ErrorCode::kInternal);
  void held(const CoreReport& report, Ms now);
  void committed(const CoreReport& report, Ms now);
  void non_finite(uint32_t rank, const std::string& where);
  static std::string non_finite_text(uint32_t rank, const std::string& where);
  void excluded(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round);
  // Every core has answered a probe: the lowest round in progress, how many messages of each rank
  // have ever come (chunks or parts of them), and missing ranks.
  void probed(uint64_t min_round, const std::vector<uint64_t>& sent,
              const std::vector<uint64_t>& waited_for, Ms now);
  void tick(Ms now);
  void remove();  // the job was deleted
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
  // No chunk is in an earlier one, not even a chunk that waits for no rank.
  uint64_t lowest_round() const { return lowest_round_; }
  // The highest round in which a lost incarnation of the rank took part; 0: none.
  uint64_t last_round(uint32_t rank) const { return ranks_[rank].last_round; }
  bool assembled() const { return assembled_; }  // all first ranks were there at one time
  // The highest round for which any contribution had come at the boundary that is committed.
  uint64_t started() const { return started_; }

 private:
  enum class State { kAbsent, kJoining, kLive, kLost, kLeft };
  struct Rank {
    State state = State::kAbsent;
    uint32_t incarnation = 0;
    uint64_t first_round = 0;
    uint64_t last_round = 0;  // the highest with its lost predecessor
    bool expected = false;    // the cores wait for it, live or not
    bool first = false;       // the job begins with it
    bool losing = false;      // its loss is pending or under way
    Ms lease_until = 0;
    Ms waited_since = 0;  // 0: no chunk waits for it
    uint64_t sent = 0;    // as of the latest probed()
    std::string reason;
  };
  struct Loss {
    uint32_t rank;
    bool left;  // it asked to leave
    std::string reason;
    uint64_t leave_token;
    bool lost = true;  // the policy applies: it did not ask, or the job had not begun
  };
  struct Join {
    uint64_t token;
    uint32_t rank;
    // Waits until its predecessor is gone from every core; until it has been admitted; for a
    // boundary.
    enum { kWaiting, kAdmitting, kAdmitted } stage = kWaiting;
    State before = State::kAbsent;  // the rank's state again if its admission fails
  };

  // membership_boundary.cc
  void admit_waiting();
  void advance();
  void build_boundary();
  uint64_t first_unbegun_round() const;
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
  const JobRules rules_;
  const uint32_t cores_;
  const uint32_t chunks_;
  const RankRange served_;
  std::vector<Rank> ranks_;
  MembershipLog log_;
  std::deque<MembershipAction> actions_;

  // Waiting for a boundary.
  std::vector<Loss> losses_;
  std::vector<Join> joins_;
  Decisions decisions_;
  std::vector<uint32_t> forgotten_;
  bool snapshot_wanted_ = false;
  bool state_wanted_ = false;
  bool save_at_end_ = false;  // the save has not begun yet
  bool saving_end_ = false;   // the save is under way
  bool has_begun() const { return assembled_ && min_round_ > 0 && !finished_; }
  std::vector<SavedRank> beyond_;  // the checkpoint's ranks above the job's present ones
  bool restored_ = false;

  // The boundary under way.
  enum class Phase { kIdle, kHolding, kCommitting } phase_ = Phase::kIdle;
  uint32_t answers_ = 0;
  uint64_t started_ = 0;
  uint64_t held_min_round_ = 0;  // the lowest that a chunk is in; as CoreReport has it
  uint64_t held_lowest_ = 0;     // the lowest of all chunks
  uint64_t lowest_round_ = 0;    // the same, at the latest boundary
  uint64_t keep_from_ = kNever;
  uint64_t committed_min_round_ = 0;  // and after the latest boundary
  Boundary boundary_;
  std::vector<Loss> current_losses_;
  std::vector<Join> current_joins_;
  std::vector<std::vector<uint64_t>> last_rounds_;

  std::map<uint32_t, uint64_t> barrier_;  // rank → token
  uint64_t min_round_ = 0;
  std::vector<uint64_t> waited_for_;
  bool assembled_ = false;
  Ms assemble_until_ = 0;  // 0: no rank has come yet
  bool finished_ = false;
  bool failed_ = false;
  std::optional<Error> failing_;  // the job fails once the boundary under way is complete
  Ms now_ = 0;
  Ms check_limits_after_ = kNever;  // no lease or time without progress ends before
  // Policies wait and fail: the job pauses before a round.
  Ms pause_until_ = 0;            // 0: not paused
  uint64_t fail_after_ = kNever;  // policy fail: once this round is complete
  std::string fail_message_;
};

}  // namespace phub
