// The snapshots of a running job: when and of which round one is taken, and how it becomes a
// checkpoint.
//
// Without ranks that save their own state, a snapshot is of the round before its boundary. With
// them it is of the first round, from its boundary on, that is a multiple of --checkpoint-every:
// ranks know these rounds from the reply to their join (worker/save/saver.h). No chunk has closed
// that round when the cores learn of it, so no rank has its results yet, and no part can come
// before the box knows that it wants the part. The boundary is made as soon as the snapshot before
// is written, long before it is needed. Out of lock-step some ranks are further than others: the
// round is one that none has begun.
//
// Without an optimizer, in lock-step, the model is the workers' own: a checkpoint has only parts.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/part_desk.h"
#include "phub/job/savers.h"
#include "phub/task.h"

namespace phub {

class SaveDesk {
 public:
  // `savers` and `parts` outlive this.
  SaveDesk(const JobContext& context, Savers& savers, PartDesk& parts);

  // A rank asks for a checkpoint of the rounds that are complete now; or, with the round of such an
  // answer, for the state of that checkpoint. Throws Error: the job is not saved; or why that
  // checkpoint was not written.
  void checkpoint(uint64_t round, Reply<CheckpointReply> reply);

  // Saves the job once more, before the server ends: as it is now, by a boundary that is made for
  // it; or, if ranks save their own state, after the next round that they know to be saved. Does
  // nothing if the job has no state to save, has not begun or has ended.
  void save();
  // With ranks that save: false if no round has completed since the newest checkpoint.
  bool is_saving() const;

  // All ranks have left: saves the job, then tells the membership.
  void save_end();
  bool is_saving_end() const { return saving_end_; }
  // A standby has lost its source (standby.h), which every core detaches now, and says so with
  // source_detached(). Then saves the job for the source's ranks, and tells the membership.
  void await_source_detached();
  void source_detached();

  void tick(uint64_t now);
  void at_boundary(Boundary& boundary);  // REQUIRES: boundary.snapshot
  void core_snapped(uint64_t round);     // a core has copied its chunks as of after the round
  // A boundary is over, or a core has copied: the copy may be complete.
  void finish_copy();
  // Something new is known about the parts that the snapshot needs.
  void check_parts();
  void end();  // the job ends
  // Answers the calls that wait for a snapshot's round.
  void answer(const Result<CheckpointReply>& answer);

  // The last round of the newest checkpoint (below a parent, of the parent's), or the last that the
  // standby has; 0: there is none.
  uint64_t durable_round() const {
    if (uplink_) return uplink_->pulse().durable_round;
    if (standby_ && !standby_->has_ended()) return standby_->pulse().completed_round;
    return durable_round_;
  }
  uint64_t copying_round() const {
    return copying_round_;
  }  // the snapshot that cores still copy; 0: none
  void add_to(JobStatus& status) const;

 private:
  void save_without_source();
  void written_without_source(uint64_t round, const std::optional<Error>& failed);
  void at_last_boundary(Boundary& boundary);
  void await_copies();
  void continue_end();
  void take_snapshot();
  Story write();
  void written(uint64_t round, const std::optional<Error>& failed);
  void check_late_parts();
  void say_that_disk_is_slow(uint64_t now);
  void note(const std::string& what);

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  RemoteParts& remote_;
  const Seats& seats_;
  const SavedLife& life_;
  Uplink* const uplink_;
  Uplink* const standby_;
  JobDriver& driver_;
  Savers& savers_;
  PartDesk& part_desk_;
  RankParts& parts_;  // those of the snapshot under way

  // A snapshot is asked for, copied by every core, and written.
  bool saving_ = false;
  bool save_again_ = false;
  bool last_save_ = false;   // this save is the last, as the server ends
  bool saving_end_ = false;  // the job is about to end: all have left
  bool end_tried_ = false;   // the save at the end was tried
  // Of a standby that has lost its source: the cores detach it; the save is under way; it failed,
  // and is tried again at save_again_ms_.
  enum class LastSave : uint8_t { kNone, kDetaching, kSaving, kFailed } last_ = LastSave::kNone;
  uint32_t cores_without_source_ = 0;
  uint64_t save_again_ms_ = 0;
  uint64_t next_save_;          // a snapshot begins when this round is complete
  uint64_t durable_round_;      // last round of the newest checkpoint; 0: none
  uint64_t copying_round_ = 0;  // the snapshot that cores still copy; 0: none
  uint32_t cores_snapped_ = 0;
  std::shared_ptr<Manifest> snapped_;  // the snapshot that waits for parts; null: none does
  uint64_t parts_until_ms_ = 0;
  uint64_t writing_round_ = 0;  // the snapshot that is being written; 0: none
  uint64_t write_began_ms_ = 0, write_is_long_ms_ = 0;
  uint64_t void_snapshots_ = 0;
  uint64_t failed_saves_ = 0;
  std::vector<Reply<CheckpointReply>> asked_;  // answered once a snapshot has its round
  uint64_t failed_round_ = 0;                  // the latest whose checkpoint was not written
  std::optional<Error> failed_save_;           // the reason
};

}  // namespace phub
