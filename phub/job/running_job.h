// A job on the box, from its first join until every core has let go of it: the driver of its cores,
// its boundaries and its end, and the desks that answer the calls to it (job_context.h).
//
// Control thread only; the builder makes it. Long work runs on other threads, and the job lives
// until it is done.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phub/background.h"
#include "phub/job/box_state.h"
#include "phub/job/branch_desk.h"
#include "phub/job/hyper_desk.h"
#include "phub/job/job_context.h"
#include "phub/job/job_end.h"
#include "phub/job/job_probes.h"
#include "phub/job/local_part.h"
#include "phub/job/member_desk.h"
#include "phub/job/meter.h"
#include "phub/job/part_desk.h"
#include "phub/job/quorum_rounds.h"
#include "phub/job/rack_desk.h"
#include "phub/job/reconnections.h"
#include "phub/job/remarks.h"
#include "phub/job/remote_parts.h"
#include "phub/job/save_desk.h"
#include "phub/job/savers.h"
#include "phub/job/seats.h"
#include "phub/job/standby_desk.h"
#include "phub/job/state_desk.h"
#include "phub/job/switch_use.h"
#include "phub/job/uplink.h"
#include "phub/task.h"

namespace phub {

class RunningJob final : private JobDriver {
 public:
  // `cores` are the server's, by core of its part of the plan; `shards` have the other parts;
  // `uplink` is a rack's (null: there is no parent), `standby` leads to the standby (null: there is
  // none). The host outlives this.
  RunningJob(std::shared_ptr<Job> job, std::string transport, std::vector<uint32_t> cores,
             JobHost& host, SavedLife life = {}, std::vector<ShardBox> shards = {},
             std::shared_ptr<Uplink> uplink = nullptr, std::shared_ptr<Uplink> standby = nullptr);

  Job& job() { return *job_; }
  const JobMeter& meter() const { return meter_; }
  uint64_t counted_bytes() const {  // in the budget
    return job_->memory().total() + grown_bytes_ + local_.interest_bytes();
  }
  JobStatus status() const;

  // Makes the shards make their parts, then calls `done`, at once if there are none. REQUIRES:
  // start() was not called yet.
  void make_remote_parts(RemoteParts::Done done);
  bool has_remote_parts() const { return !remote_.empty(); }
  void drop_remote_parts() { remote_.remove(); }  // in place of finish()
  void start();
  void tick(uint64_t now);
  uint64_t tick_ms() const;  // the shortest interval in which tick() has something to do
  // When tick() has something to do beside that; kNever: nothing.
  uint64_t due_ms() const { return quorum_ ? quorum_->due_ms() : kNever; }
  void tick_due(uint64_t now);
  // No rank may join any more.
  bool ending() const { return end_.has_come() || saves_.is_saving_end(); }
  // All ranks have left, and the job is still being saved.
  bool all_have_left() const { return saves_.is_saving_end(); }
  // No core uses it any more, and no other thread.
  bool gone() const { return end_.has_come() && local_.gone() && remote_.gone() && tasks_ == 0; }
  // Ends a job that is gone: answers all calls that wait, but those that deleted it, which are
  // answered when its memory is free.
  struct Remains {
    std::shared_ptr<Job> job;
    bool over = false;  // all have left, or it was deleted: no job goes on from its checkpoints
    std::vector<Reply<Done>> removals;
  };
  Remains finish();
  // The server ends: detaches all ranks in place of the cores, whose threads have ended.
  void detach_all();

  void run_beside(Background& thread, Background::Work work, Background::End end) override;

  LogPage log(uint64_t from);
  void remove(Reply<Done> reply);

  void handle(const CoreReport& report);
  void handle(const TransportEvent& event);
  // About the job's parts in other boxes (running_job_shards.cc).
  uint64_t number() const { return remote_.job(); }
  void handle(uint64_t shard, const ShardReport& report);
  // A box that has not answered in time. shard_moved(): a piece of any job moved to or from the
  // box.
  std::optional<RemoteParts::Late> late_shard(uint64_t now_ms) {
    return remote_.late(now_ms, membership_.rounds().completed());
  }
  void shard_moved(uint64_t shard) { remote_.moved(shard); }
  // Returns how many other boxes must be there again before the job goes on from its checkpoint; 0:
  // it does not wait for them, or has no part there.
  size_t lose_shard(uint64_t shard);
  RemoteParts& remote() { return remote_; }

  // The desks, which answer calls of ranks. REQUIRES, except for members(): the rank is a member.
  MemberDesk& members() { return members_; }
  Reconnections& reconnections() { return reconnections_; }
  HyperDesk& hyper() { return hyper_; }
  BranchDesk& branches() { return branches_; }
  SaveDesk& saves() { return saves_; }
  PartDesk& parts() { return parts_; }
  Remarks& remarks() { return remarks_; }
  void forgo_standby(const Credential& who);
  StateDesk& states() { return rack_ ? rack_->states() : state_; }

 private:
  uint64_t tick_ms(uint64_t most) const;
  JobContext context();
  const JobEnd& end() const override { return end_; }
  void carry_out() override;
  void count_growth() override;
  void act(MembershipAction& action);
  Story admit(uint32_t rank, Seat seat);
  void commit(const MembershipAction& action);
  void end_with(ErrorCode code, const std::string& error);
  void revoke(uint32_t rank);

  JobHost& host_;
  std::shared_ptr<Job> job_;
  Membership& membership_;
  const std::string transport_;
  JobMeter meter_;
  LocalPart local_;
  RemoteParts remote_;
  const std::array<Part*, 2> everywhere_{&local_, &remote_};
  const std::shared_ptr<Uplink> uplink_;   // null: there is no parent
  const std::shared_ptr<Uplink> standby_;  // null: there is no standby
  JobProbes probes_;
  SwitchUse switch_;
  Remarks remarks_;
  std::optional<QuorumRounds> quorum_;  // nullopt: rounds wait for all ranks

  Seats seats_;
  Requests requests_;

  const SavedLife life_;
  JobEnd end_;
  Savers savers_;
  PartDesk parts_;
  SaveDesk saves_;
  Reconnections reconnections_;
  HyperDesk hyper_;
  BranchDesk branches_;
  BoxState state_;
  const std::unique_ptr<RackDesk> rack_;             // null: there is no parent
  const std::unique_ptr<StandbyDesk> standby_desk_;  // null: there is no standby
  MemberDesk members_;

  uint64_t grown_bytes_;  // as counted in the budget
  uint32_t tasks_ = 0;    // under way on other threads
  uint64_t next_tick_ms_ = 0;
  std::vector<Reply<Done>> removals_;
};

}  // namespace phub
