// The ranks that take part in a job, and from which round on: a pure state machine.
//
// It is fed decoded requests, reports of the cores and the time, and answers with actions for the
// server to carry out in order. No sockets, threads or clocks: the simulator runs the same code.
// Its parts: the table of ranks with their leases; the changes that wait for a boundary, and the
// boundary under way, by which alone anything changes; the policy for ranks that are missing. The
// membership itself joins ranks, watches limits, and ends the job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/job/changes.h"
#include "phub/job/members.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

class Membership {
 public:
  using Ms = uint64_t;  // monotonic milliseconds

  // The first join begins the time in which all first ranks must come (join_limit_ms).
  // `served` are the ranks of this box; the others are at other racks. `life` is the job's
  // incarnation at its parent, if it is a rack's. `spec` outlives this.
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks, const RankRange& served,
             uint32_t life = 1);
  Membership(const JobSpec& spec, uint32_t cores, uint32_t chunks)
      : Membership(spec, cores, chunks, {0, spec.max_ranks}) {}
  // The job goes on from a checkpoint: the ranks that it names as expected are its first. `clocks`
  // has the round of each rank's last update to each chunk, if the job is not in lock-step.
  // REQUIRES: no other call came before.
  void restore(const Manifest& saved, const SavedClocks& clocks = {});
  // The members for a checkpoint, once every core has copied its chunks as they were after `round`:
  // later decisions are void when it is restored.
  // REQUIRES: !changes().is_committing()
  Manifest saved(uint64_t round);

  // The parts.
  const RankTable& ranks() const { return members_.ranks; }
  Leases& leases() { return members_.leases; }
  const Leases& leases() const { return members_.leases; }
  JobRounds& rounds() { return members_.rounds; }
  const JobRounds& rounds() const { return members_.rounds; }
  Barrier& barrier() { return members_.barrier; }
  MembershipLog& log() { return members_.log; }
  const MembershipLog& log() const { return members_.log; }
  MembershipActions& actions() { return members_.actions; }
  Changes& changes() { return changes_; }

  // Requests; `token` comes back in a kReply. Others are the changes'.
  void join(uint64_t token, int32_t rank, bool replace, Ms now);
  void enter_barrier(uint64_t token, uint32_t rank);
  // When the last rank leaves, the job is to be saved (kSave) before it ends. No rank joins
  // meanwhile.
  void save_at_end() { save_at_end_ = true; }
  void end_saved();

  // Events of ranks and cores.
  void admitted(uint32_t rank, bool ok, const std::string& message);
  void held(const CoreReport& report, Ms now);
  void committed(const CoreReport& report, Ms now);
  // Every core has answered a probe: the lowest round in progress, and what leases() need.
  void probed(uint64_t min_round, const std::vector<uint64_t>& sent,
              const std::vector<uint64_t>& waited_for, Ms now);
  void tick(Ms now);
  // A core, a device or a box can no longer serve the job.
  void failed(const std::string& reason, ErrorCode code = ErrorCode::kInternal);
  // The job ends with this error, once the boundary that the cores carry out is complete.
  void fail(ErrorCode code, const std::string& message);

  std::vector<RankStatus> statuses() const;
  std::string state() const;
  bool assembled() const { return members_.policy.assembled(); }

 private:
  void check_barrier();
  void check_leases(Ms now);
  void check_join_limit(Ms now);
  void check_abandoned();
  void finish(ErrorCode code, const std::string& message);

  Members members_;
  Changes changes_;
  bool restored_ = false;
  bool finished_ = false;
  bool failed_ = false;
  std::optional<Error> failing_;  // the job fails once the boundary under way is complete
  bool save_at_end_ = false;      // the save has not begun yet
  bool saving_end_ = false;       // the save is under way
};

// Says why a job ends that stops for a NaN or an infinity.
std::string non_finite_text(uint32_t rank, const std::string& where);

}  // namespace phub
