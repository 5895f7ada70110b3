// A running job: its snapshots, and the parts of ranks that belong to them.
//
// Without ranks that save, a snapshot is of the round before its boundary. With them it is of the
// first round, from its boundary on, that is a multiple of --checkpoint-every: ranks know these
// from the reply to their join (worker/saver.h). No chunk has closed that round when the cores
// learn of it, so nobody has its results yet: no part can have come before the box knows that it
// wants it. The boundary is made as soon as the snapshot before is written, long before it is
// needed. Out of lock-step some ranks are further than others: it is a round that none has begun.
//
// Without an optimizer, in lock-step, the model is the workers' own: a checkpoint has only parts.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/running_job.h"

namespace phub {

namespace {
constexpr uint64_t kLongWriteMs = 60000;  // a disk that takes longer for a checkpoint may hang
}

void RunningJob::tick_save(uint64_t now) {
  if (!host_.checkpoints) return;
  if (writing_round_ > 0 && now >= write_is_long_ms_) say_that_disk_is_slow(now);
  const bool late = snapped_ && now > parts_until_ms_ && parts_.why_void().empty();
  if (late) check_late_parts();
  if (saving_ || last_save_ || saving_end_) return;
  const uint64_t completed = membership_.completed_round();
  // One that failed is not tried again at once.
  const bool is_for_killed = membership_.branches().wants_checkpoint(failed_round_ + 1, completed);
  if (completed >= (any_saves() ? durable_round_ : next_save_) || is_for_killed) take_snapshot();
}

// What has come and waits for the disk is written some time.
void RunningJob::check_late_parts() {
  const uint32_t limit_ms = job_->spec().progress_limit_ms;
  const std::vector<uint32_t> racks = racks_to_say(parts_.round());
  if (!racks.empty()) {
    parts_.make_void(fmt::format("racks {} have not said within {} ms who took part",
                                 fmt::join(racks, ", "), limit_ms));
  } else if (!parts_.awaited().empty()) {
    parts_.make_void(fmt::format("the parts of ranks {} have not come within {} ms",
                                 fmt::join(parts_.awaited(), ", "), limit_ms));
  }
  continue_snapshot();
}

void RunningJob::save() {
  last_save_ = true;
  // The one under way is as good as one that is taken now.
  if (saving_ && (parts_.round() > 0 || membership_.awaits_snapshot())) return;
  if (saving_) {
    save_again_ = true;
    return;
  }
  take_snapshot();
  carry_out();
}

// All have left: what they leave is saved, for those who want the model. Of ranks that save their
// own state it has no parts, as nobody goes on from it. A snapshot of a round that nobody will
// complete is dropped, one that is being copied or written comes first.
void RunningJob::save_end() {
  saving_end_ = true;
  ++host_.ending;
  const bool is_void = saving_ && copying_round_ > membership_.completed_round();
  if (is_void) drop_parts();
  if (is_void || !saving_) return continue_end();
}

void RunningJob::continue_end() {
  const uint64_t last = membership_.completed_round();
  saving_ = false;
  if (durable_round_ < last && !std::exchange(end_tried_, true)) take_snapshot();
  if (saving_) return;
  if (durable_round_ > 0 && durable_round_ == last) {
    note_save(fmt::format("all ranks have left after round {}, and that is saved", last));
  }
  membership_.end_saved();
}

void RunningJob::take_snapshot() {
  if (!host_.checkpoints || !job_->takes_snapshots() || ending_) return;
  if (job_->saved_arrays() == 0 && !any_saves()) return;
  saving_ = membership_.take_snapshot();
}

void RunningJob::choose_saved_round(Boundary& boundary) {
  if (saving_end_) {
    copying_round_ = membership_.completed_round();
    boundary.snapshot_round = copying_round_ + 1;
    boundary.snapshot_at_end = true;
    cores_snapped_ = 0;
    parts_.end();
    return answer_checkpoints(CheckpointReply{.round = copying_round_});
  }
  forget_savers();  // of rounds that are durable
  const bool joins = std::ranges::any_of(
      boundary.admitted, [this](const auto& admitted) { return seats_[admitted.rank].saves; });
  // The round that is complete may be one of somebody who did not live to send its part of it.
  const bool lost = std::ranges::any_of(
      lost_savers_, [&boundary](const SaverStay& stay) { return stay.covers(boundary.round - 1); });
  const bool has_parts = joins || lost || any_saves();
  if (!has_parts && job_->saved_arrays() == 0) {  // those that save have gone meanwhile
    boundary.snapshot = saving_ = false;
    return answer_checkpoints(
        {ErrorCode::kInvalid,
         fmt::format("no rank of job '{}' saves any more", job_->spec().name)});
  }
  copying_round_ = boundary.round - 1;
  if (has_parts) {
    const uint64_t every = host_.checkpoints->every();
    const uint64_t first = job_->choices().lock_step()
                               ? boundary.round
                               : std::max(boundary.round, membership_.started() + 1);
    copying_round_ = (first + every - 1) / every * every;
    boundary.snapshot_round = copying_round_ + 1;
    parts_.begin(copying_round_);
  } else {
    parts_.end();
  }
  membership_.keep_from(copying_round_ + 1);
  if (failed_round_ >= copying_round_) failed_round_ = 0;  // it is tried again
  if (copying_round_ > 0) return answer_checkpoints(CheckpointReply{.round = copying_round_});
  answer_checkpoints({ErrorCode::kInvalid,
                      fmt::format("no round of job '{}' is complete: there is nothing to save yet",
                                  job_->spec().name)});
}

// What is complete now is in the snapshot that some core still copies, as no round is complete
// without all of them. One that is being written may be older: then the next one is meant.
void RunningJob::checkpoint(uint64_t round, Reply<CheckpointReply> reply) {
  const std::string& name = job_->spec().name;
  if (uplink_) return uplink_->checkpoint(round, std::move(reply));
  if (!host_.checkpoints) {
    fail(ErrorCode::kInvalid,
         "this server keeps no checkpoints: start it with 'phub serve --checkpoints DIR'");
  }
  if (!job_->takes_snapshots()) {
    fail(ErrorCode::kInvalid,
         "job '{}' is not saved: without an optimizer its model is the workers' own, and the rank "
         "that created it has no saver",
         name);
  }
  if (round > 0) {
    const bool durable = durable_round_ >= round;
    if (!durable && failed_round_ >= round) {
      fail(failed_save_->code(), "the checkpoint of round {} of job '{}' was not written: {}",
           failed_round_, name, failed_save_->what());
    }
    return reply(CheckpointReply{.round = round, .durable = durable});
  }
  const bool copied = cores_snapped_ == job_->all_cores();  // and waits for a boundary
  if (copying_round_ > 0 && !copied) return reply(CheckpointReply{.round = copying_round_});
  if (!saving_) take_snapshot();
  if (!saving_) {
    fail(ErrorCode::kInvalid, "job '{}' has not begun{}: there is nothing to save yet", name,
         job_->saved_arrays() == 0 ? ", or no rank of it saves" : "");
  }
  checkpoints_asked_.push_back(std::move(reply));
  carry_out();
}

void RunningJob::answer_checkpoints(const Result<CheckpointReply>& answer) {
  for (const auto& reply : std::exchange(checkpoints_asked_, {})) reply(answer);
}

// Once every core has copied its chunks. The copy is free for the next snapshot when it is written.
// Where a boundary is under way, some cores have closed the round with what it decided (a rank is
// lost, values are set): the manifest says so only when the boundary is over.
void RunningJob::finish_copy() {
  if (cores_snapped_ < job_->all_cores() || membership_.is_committing()) return;
  const uint64_t round = copying_round_;
  cores_snapped_ = 0;
  copying_round_ = 0;
  membership_.keep_from(kNever);
  if (round == durable_round_) {
    drop_parts();
    return snapshot_written(round, std::nullopt);
  }
  job_->take_clocks_of_others();
  snapped_ = std::make_shared<Manifest>(membership_.saved(round));
  for (SavedShelf& shelf : snapped_->branches.shelves) {
    if (!is_copied(shelf, job_->spec())) continue;
    shelf.steps = job_->saved_steps_of_shelf(shelf.place);
  }
  snapped_->spec = job_->spec();
  snapped_->hyper = job_->hyper().needed_from(round + 1);
  snapped_->steps = job_->saved_steps(round);
  snapped_->epoch = life_.epoch;
  snapped_->owner = life_.owner;
  parts_until_ms_ = host_.time.now_ms() + job_->spec().progress_limit_ms;
  continue_snapshot();
}

void RunningJob::continue_snapshot() {
  if (parts_.round() > 0) {
    const bool all_known = snapped_ && racks_to_say(parts_.round()).empty();
    parts_.judge(savers(), all_known);
    if (all_known && job_->saved_arrays() == 0 && !parts_.needs_any()) {
      parts_.make_void("no rank that was in the round saves");
    }
  }
  if (!snapped_ || ending_) return;
  if (!parts_.why_void().empty()) {
    ++void_snapshots_;
    const Error why(ErrorCode::kRankLost, parts_.why_void());
    const uint64_t round = std::exchange(snapped_, nullptr)->round;
    drop_parts();
    save_again_ = save_again_ || last_save_;  // the server is to end when it has saved
    return snapshot_written(round, why);
  }
  if (parts_.complete()) write_snapshot();
}

void RunningJob::write_snapshot() {
  const std::shared_ptr<Manifest> saved = std::exchange(snapped_, nullptr);
  const auto also = std::make_shared<std::string>();  // what went wrong beside it
  parts_.end();
  writing_round_ = saved->round;
  write_began_ms_ = host_.time.now_ms();
  write_is_long_ms_ =
      write_began_ms_ + std::min<uint64_t>(kLongWriteMs, job_->spec().progress_limit_ms);
  run_beside(
      host_.writer,
      [this, saved, also, is_end = saving_end_] {
        *also = host_.checkpoints->write(*job_, *saved, is_end);
      },
      [this, saved, also](const std::optional<Error>& failed) {
        writing_round_ = 0;
        if (!also->empty()) note_save(*also);
        if (failed) ++failed_saves_;
        snapshot_written(saved->round, failed);
        carry_out();
      });
}

void RunningJob::snapshot_written(uint64_t round, const std::optional<Error>& failed) {
  saving_ = false;
  if (failed) {
    failed_round_ = round;
    failed_save_.emplace(failed->code(), failed->what());
    note_save(fmt::format("round {} was not saved, the last that is remains round {}: {}", round,
                          durable_round_, failed->what()));
  } else {
    durable_round_ = round;
    membership_.saved_durably(round);
  }
  next_save_ =
      (failed ? membership_.completed_round() : durable_round_) + host_.checkpoints->every();
  if (saving_end_) return continue_end();
  if (std::exchange(save_again_, false)) return save();
  if (!checkpoints_asked_.empty()) take_snapshot();
}

// Each time that it has taken twice as long.
void RunningJob::say_that_disk_is_slow(uint64_t now) {
  const uint64_t took_ms = now - write_began_ms_;
  write_is_long_ms_ = now + took_ms;
  note_save(
      fmt::format("round {} has been on its way to the disk for {} s, the last that is saved "
                  "remains round {}: the disk is slow, or does not answer",
                  writing_round_, took_ms / 1000, durable_round_));
}

void RunningJob::note_save(const std::string& what) {
  host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}': {}", job_->spec().name, what));
}

}  // namespace phub
