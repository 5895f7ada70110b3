// A job on the box, from its first join until every core has let go of it: the driver of its cores,
// its boundaries and its end, and the desks that answer the calls to it (job_context.h).
//
// Control thread only; the builder makes it. What takes long runs beside that thread, and the job
// stays until it is done.
#pragma once

#include <array>
#include <cstdint>
#include <map>
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
#include "phub/job/local_part.h"
#include "phub/job/member_desk.h"
#include "phub/job/meter.h"
#include "phub/job/part_desk.h"
#include "phub/job/rack_desk.h"
#include "phub/job/reconnections.h"
#include "phub/job/remote_parts.h"
#include "phub/job/save_desk.h"
#include "phub/job/savers.h"
#include "phub/job/seats.h"
#include "phub/job/state_desk.h"
#include "phub/job/uplink.h"

namespace phub {

class RunningJob final : private JobDriver {
 public:
  // `cores`: of the server, by core of its part of the plan; `shards`: who has the other parts;
  // `uplink`: of a rack, null: there is no parent. The host outlives this.
  RunningJob(std::shared_ptr<Job> job, std::string transport, std::vector<uint32_t> cores,
             JobHost& host, SavedLife life = {}, std::vector<ShardBox> shards = {},
             std::shared_ptr<Uplink> uplink = nullptr);

  Job& job() { return *job_; }
  const JobMeter& meter() const { return meter_; }
  uint64_t counted_bytes() const {  // in the budget
    return job_->memory().total() + grown_bytes_ + local_.interest_bytes();
  }
  JobStatus status() const;

  // The shards make their parts; then `done` is called, at once if there are none. Before start().
  void make_remote_parts(RemoteParts::Done done);
  bool has_remote_parts() const { return !remote_.empty(); }
  void drop_remote_parts() { remote_.remove(); }  // in its stead
  void start();
  void tick(uint64_t now);
  uint64_t tick_ms() const;  // the shortest interval in which tick() has something to do
  // Nobody joins it any more.
  bool ending() const { return ending_ || saves_.is_saving_end(); }
  // Only what they leave is still saved.
  bool all_have_left() const { return saves_.is_saving_end(); }
  // Nothing uses it any more: no core, and nothing beside the control thread.
  bool gone() const { return ending_ && local_.gone() && remote_.gone() && tasks_ == 0; }
  // The end of a job that is gone: those who wait get their answers, but for those who deleted it:
  // they are answered when its memory is free.
  struct Remains {
    std::shared_ptr<Job> job;
    bool over = false;  // all have left, or it was deleted: nobody goes on from its checkpoints
    std::vector<Reply<Done>> removals;
  };
  Remains finish();
  // The server ends; in the cores' stead, whose threads have ended.
  void detach_all();

  void run_beside(Background& thread, Background::Work work, Background::End end) override;

  LogPage log(uint64_t from);
  void remove(Reply<Done> reply);

  void handle(const CoreReport& report);
  void handle(const TransportEvent& event);
  // Of the job's remote part there (running_job_shards.cc).
  uint64_t number() const { return remote_.job(); }
  void handle(uint64_t shard, const ShardReport& report);
  // A box that has not answered in time; a piece of it has moved, of whichever job.
  std::optional<RemoteParts::Late> late_shard(uint64_t now_ms) {
    return remote_.late(now_ms, membership_.completed_round());
  }
  void shard_moved(uint64_t shard) { remote_.moved(shard); }
  // Returns how many other boxes are to be there again before the job goes on from its checkpoint;
  // 0: it does not wait for them, or has no part there.
  size_t lose_shard(uint64_t shard);
  RemoteParts& remote() { return remote_; }

  // The desks, which answer calls of ranks. REQUIRES, but for those of members(): the rank is a
  // member.
  MemberDesk& members() { return members_; }
  Reconnections& reconnections() { return reconnections_; }
  HyperDesk& hyper() { return hyper_; }
  BranchDesk& branches() { return branches_; }
  SaveDesk& saves() { return saves_; }
  PartDesk& parts() { return parts_; }
  StateDesk& states() { return rack_ ? rack_->states() : state_; }

 private:
  // After the last round the rates are taken until they are 0.
  static constexpr uint64_t kRatesFadeMs = 3000;

  // running_job.cc
  uint64_t tick_ms(uint64_t most) const;
  JobContext context();
  bool has_ended() const override { return ending_; }
  ErrorCode end_code() const override { return error_code_; }
  const std::string& end_error() const override { return error_; }
  void carry_out() override;
  void count_growth() override;
  uint64_t new_number() override { return ++numbers_; }
  void act(MembershipAction& action);
  void admit(const MembershipAction& action);
  void admit(uint32_t rank, const std::shared_ptr<Seat>& seat, size_t part);
  void commit(const MembershipAction& action);
  void end(ErrorCode code, const std::string& error);
  void revoke(uint32_t rank);

  // running_job_reports.cc
  void switch_changed(const CoreReport& report);
  void probe(uint64_t now);
  void collect_probes();

  // running_job_shards.cc
  bool has_racks() const { return !job_->spec().rack_ranks.empty(); }
  void check_rank(const ShardReport& report) const;
  void close_gate(uint64_t shard, const ShardReport& report);

  JobHost& host_;
  std::shared_ptr<Job> job_;
  Membership& membership_;
  const std::string transport_;
  JobMeter meter_;
  LocalPart local_;
  RemoteParts remote_;
  const std::array<Part*, 2> everywhere_{&local_, &remote_};
  const std::shared_ptr<Uplink> uplink_;  // null: there is no parent

  Seats seats_;
  Requests requests_;

  // What the cores are asked about.
  uint32_t probes_out_ = 0;
  uint64_t next_tick_ms_ = 0;
  uint64_t next_probe_ms_ = 0;
  uint64_t active_ms_ = 0;  // when something was seen to happen last

  const SavedLife life_;
  std::map<uint32_t, std::string> switch_ended_;  // by core that takes no sums now: why

  Savers savers_;
  PartDesk parts_;
  SaveDesk saves_;
  Reconnections reconnections_;
  HyperDesk hyper_;
  BranchDesk branches_;
  BoxState state_;
  const std::unique_ptr<RackDesk> rack_;  // null: there is no parent
  MemberDesk members_;
  uint64_t numbers_ = 0;  // that were given: see new_number()

  uint64_t grown_bytes_;  // as counted in the budget
  uint32_t tasks_ = 0;    // beside the control thread
  bool ending_ = false;
  ErrorCode error_code_ = ErrorCode::kInternal;
  std::string error_;  // empty: it ends well
  std::vector<Reply<Done>> removals_;
};

}  // namespace phub
