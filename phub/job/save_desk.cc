#include "phub/job/save_desk.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/standby.h"

namespace phub {
namespace {

constexpr uint64_t kLongWriteMs = 60000;  // a disk that takes longer for a checkpoint may hang

}  // namespace

SaveDesk::SaveDesk(const JobContext& context, Savers& savers, PartDesk& parts)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      remote_(context.remote),
      seats_(context.seats),
      life_(context.life),
      uplink_(context.uplink),
      standby_(context.standby),
      driver_(context.driver),
      savers_(savers),
      part_desk_(parts),
      parts_(parts.of_snapshot()),
      next_save_(life_.durable_round + (host_.checkpoints ? host_.checkpoints->every() : 0)),
      durable_round_(life_.durable_round) {}

// A snapshot that some core still copies has all rounds that are complete now, as no round is
// complete without all cores. A snapshot that is being written may be older: then the rank waits
// for the next one.
void SaveDesk::checkpoint(uint64_t round, Reply<CheckpointReply> reply) {
  const std::string& name = job_.spec().name;
  if (Uplink* const above = uplink_ ? uplink_ : standby_) {
    return above->ask(std::move(reply), [&](Parent& parent, const Credential& who, auto answer) {
      parent.checkpoint(who, {.round = round}, std::move(answer));
    });
  }
  if (!host_.checkpoints) {
    fail(ErrorCode::kInvalid,
         "this server keeps no checkpoints: start it with 'phub serve --checkpoints DIR'");
  }
  if (job_.spec().saved == Saved::kNo) {
    fail(ErrorCode::kInvalid, "job '{}' is not saved: its option saved is 'no'", name);
  }
  if (!job_.takes_snapshots()) {
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
  const bool copied = cores_snapped_ == job_.all_cores();  // and waits for a boundary
  if (copying_round_ > 0 && !copied) return reply(CheckpointReply{.round = copying_round_});
  if (!saving_) take_snapshot();
  if (!saving_) {
    fail(ErrorCode::kInvalid, "job '{}' has not begun{}: there is nothing to save yet", name,
         job_.saved_arrays() == 0 ? ", or no rank of it saves" : "");
  }
  asked_.push_back(std::move(reply));
  driver_.carry_out();
}

bool SaveDesk::is_saving() const {
  if (saving_end_) return true;
  const bool only_waits = parts_.round() > 0 && !snapped_;
  return saving_ && !(only_waits && membership_.rounds().completed() <= durable_round_);
}

void SaveDesk::save() {
  last_save_ = true;
  // The snapshot under way is as good as one that is taken now.
  if (saving_ && (parts_.round() > 0 || membership_.changes().awaits_snapshot())) return;
  if (saving_) {
    save_again_ = true;
    return;
  }
  take_snapshot();
  driver_.carry_out();
}

void SaveDesk::tick(uint64_t now) {
  if (!host_.checkpoints) return;
  if (last_ == LastSave::kFailed && now >= save_again_ms_) return save_without_source();
  if (writing_round_ > 0 && now >= write_is_long_ms_) say_that_disk_is_slow(now);
  const bool late = snapped_ && now > parts_until_ms_ && parts_.why_void().empty();
  if (late) check_late_parts();
  if (saving_ || last_save_ || saving_end_) return;
  const uint64_t completed = membership_.rounds().completed();
  // A snapshot that failed is not tried again at once.
  const bool is_for_killed =
      membership_.changes().decisions().branches().wants_checkpoint(failed_round_ + 1, completed);
  if (completed >= (savers_.any() ? durable_round_ : next_save_) || is_for_killed) take_snapshot();
}

// Parts that have come and wait for the disk are not late: they are written some time.
void SaveDesk::check_late_parts() {
  const uint32_t limit_ms = job_.spec().progress_limit_ms;
  const std::vector<uint32_t> racks = savers_.racks_to_say(parts_.round());
  if (!racks.empty()) {
    parts_.make_void(fmt::format("racks {} have not said within {} ms who took part",
                                 fmt::join(racks, ", "), limit_ms));
  } else if (!parts_.awaited().empty()) {
    parts_.make_void(fmt::format("the parts of ranks {} have not come within {} ms",
                                 fmt::join(parts_.awaited(), ", "), limit_ms));
  }
  check_parts();
}

// Saves the job's last state, for users of the model. No job goes on from this checkpoint, so it
// has no parts of ranks that save their own state. A snapshot of a round that will never complete
// is dropped; one that is being copied or written comes first.
void SaveDesk::save_end() {
  saving_end_ = true;
  const bool is_void = saving_ && copying_round_ > membership_.rounds().completed();
  if (is_void) part_desk_.drop();
  if (is_void || !saving_) return continue_end();
}

void SaveDesk::await_source_detached() {
  saving_end_ = true;
  last_ = LastSave::kDetaching;
  cores_without_source_ = 0;
}

// From now on no core closes a round, and the gate has decided whatever it will. A snapshot under
// way is dropped, unless it is being written: then written() goes on.
void SaveDesk::source_detached() {
  if (++cores_without_source_ == job_.cores() && writing_round_ == 0) save_without_source();
}

// In a life of its own: the members belong to these rounds alone. It is the only copy, so it is
// tried until it is written.
void SaveDesk::save_without_source() {
  last_ = LastSave::kSaving;
  part_desk_.drop();
  copying_round_ = 0;
  cores_snapped_ = 0;
  snapped_ = nullptr;
  saving_ = job_.gate()->last_decided() > 0 && membership_.changes().ask(&Boundary::snapshot, true);
  if (!saving_) membership_.end_saved();  // there is nothing to go on from
}

void SaveDesk::written_without_source(uint64_t round, const std::optional<Error>& failed) {
  if (last_ == LastSave::kDetaching) {  // one from before
    if (cores_without_source_ == job_.cores()) save_without_source();
  } else if (failed) {
    constexpr uint64_t kAgainMs = 2000;
    last_ = LastSave::kFailed;
    save_again_ms_ = host_.time.now_ms() + kAgainMs;
  } else {
    note(
        fmt::format("the box that this one stands by for is lost, and round {} is saved: the job "
                    "goes on when more than half of its ranks have joined here",
                    round));
    membership_.end_saved();
  }
}

void SaveDesk::continue_end() {
  const uint64_t last = membership_.rounds().completed();
  saving_ = false;
  if (durable_round_ < last && !std::exchange(end_tried_, true)) take_snapshot();
  if (saving_) return;
  if (durable_round_ > 0 && durable_round_ == last) {
    note(fmt::format("all ranks have left after round {}, and that is saved", last));
  }
  membership_.end_saved();
}

void SaveDesk::take_snapshot() {
  if (!host_.checkpoints || !job_.takes_snapshots() || driver_.has_ended()) return;
  if (job_.saved_arrays() == 0 && !savers_.any()) return;
  saving_ = membership_.changes().ask(&Boundary::snapshot);
}

void SaveDesk::at_boundary(Boundary& boundary) {
  if (last_ != LastSave::kNone) return at_last_boundary(boundary);
  if (saving_end_) {
    copying_round_ = membership_.rounds().completed();
    boundary.snapshot_round = copying_round_ + 1;
    boundary.snapshot_at_end = true;
    cores_snapped_ = 0;
    parts_.end();
    await_copies();
    return answer(CheckpointReply{.round = copying_round_});
  }
  savers_.forget(durable_round());
  const bool joins = std::ranges::any_of(
      boundary.admitted, [this](const auto& admitted) { return seats_[admitted.rank].saves; });
  // A rank that took part in the round that is complete may be gone without having sent its part.
  const bool has_parts = joins || savers_.any_lost_in(boundary.round - 1) || savers_.any();
  if (!has_parts && job_.saved_arrays() == 0) {  // ranks that save were there, and are gone
    boundary.snapshot = saving_ = false;
    return answer(
        {ErrorCode::kInvalid, fmt::format("no rank of job '{}' saves any more", job_.spec().name)});
  }
  copying_round_ = boundary.round - 1;
  if (has_parts) {
    const uint64_t every = host_.checkpoints->every();
    const uint64_t first = job_.rules().lock_step()
                               ? boundary.round
                               : std::max(boundary.round, membership_.rounds().started() + 1);
    copying_round_ = (first + every - 1) / every * every;
    boundary.snapshot_round = copying_round_ + 1;
    parts_.begin(copying_round_);
  } else {
    parts_.end();
  }
  membership_.rounds().keep_from(copying_round_ + 1);
  await_copies();
  if (failed_round_ >= copying_round_) failed_round_ = 0;  // it is tried again
  if (copying_round_ > 0) return answer(CheckpointReply{.round = copying_round_});
  answer({ErrorCode::kInvalid,
          fmt::format("no round of job '{}' is complete: there is nothing to save yet",
                      job_.spec().name)});
}

// A boundary may have been under way when the source was lost.
void SaveDesk::at_last_boundary(Boundary& boundary) {
  boundary.snapshot = last_ == LastSave::kSaving && copying_round_ == 0;
  if (!boundary.snapshot) return;
  copying_round_ = job_.gate()->last_decided();
  boundary.snapshot_round = copying_round_ + 1;
  boundary.snapshot_exact = true;
  parts_.end();
}

// Other boxes send the copies of their cores.
void SaveDesk::await_copies() {
  for (uint32_t box = 1; box < job_.boxes(); ++box) {
    remote_.moves().begin(box, BoxMoves::Direction::kReceive, {.round = copying_round_},
                          job_.image_of(box));
  }
}

// The copy is free for the next snapshot when it is written. While a boundary is under way, some
// cores have closed the round with the boundary's changes (a rank is lost, values are set). The
// membership knows these, for the manifest, only when the boundary is over.
void SaveDesk::finish_copy() {
  if (cores_snapped_ < job_.all_cores() || membership_.changes().is_committing()) return;
  if (last_ == LastSave::kDetaching) return;  // it is dropped
  const uint64_t round = copying_round_;
  cores_snapped_ = 0;
  copying_round_ = 0;
  remote_.moves().end({.round = round});
  membership_.rounds().keep_from(kNever);
  if (round == durable_round_ && last_ == LastSave::kNone) {
    part_desk_.drop();
    return written(round, std::nullopt);
  }
  job_.take_clocks_of_others();
  snapped_ = std::make_shared<Manifest>(membership_.saved(round));
  for (SavedShelf& shelf : snapped_->branches.shelves) {
    if (!is_copied(shelf, job_.spec())) continue;
    shelf.steps = job_.saved_steps_of_shelf(shelf.place);
  }
  snapped_->spec = job_.spec();
  if (job_.rules().mirrors) save_members(seats_[0].rack, *snapped_);
  if (last_ == LastSave::kSaving) snapped_->source_epoch = life_.epoch;
  snapped_->hyper = job_.hyper().needed_from(round + 1);
  snapped_->steps = job_.saved_steps(round);
  snapped_->epoch = life_.epoch;
  snapped_->owner = life_.owner;
  parts_until_ms_ = host_.time.now_ms() + job_.spec().progress_limit_ms;
  check_parts();
}

void SaveDesk::core_snapped(uint64_t round) {
  if (round != copying_round_) return;  // the snapshot was dropped
  ++cores_snapped_;
  finish_copy();
}

void SaveDesk::check_parts() {
  if (parts_.round() > 0) {
    const bool all_known = snapped_ && savers_.racks_to_say(parts_.round()).empty();
    parts_.judge(savers_.stays(), all_known);
    if (all_known && job_.saved_arrays() == 0 && !parts_.needs_any()) {
      parts_.make_void("no rank that was in the round saves");
    }
  }
  if (!snapped_ || driver_.has_ended()) return;
  if (!parts_.why_void().empty()) {
    ++void_snapshots_;
    const Error why(ErrorCode::kRankLost, parts_.why_void());
    const uint64_t round = std::exchange(snapped_, nullptr)->round;
    part_desk_.drop();
    save_again_ = save_again_ || last_save_;  // the server is to end when it has saved
    return written(round, why);
  }
  if (parts_.complete()) write();
}

Story SaveDesk::write() {
  const std::shared_ptr<Manifest> saved = std::exchange(snapped_, nullptr);
  const bool is_end = saving_end_ && last_ == LastSave::kNone;
  parts_.end();
  writing_round_ = saved->round;
  write_began_ms_ = host_.time.now_ms();
  write_is_long_ms_ =
      write_began_ms_ + std::min<uint64_t>(kLongWriteMs, job_.spec().progress_limit_ms);
  std::string problems;  // beside it
  const auto to_disk = [&] {
    if (saved->source_epoch > 0) saved->epoch = host_.checkpoints->begin_life(saved->spec.name);
    problems = host_.checkpoints->write(job_, *saved, is_end);
  };
  const std::optional<Error> failed = co_await beside(driver_, host_.writer, to_disk);
  writing_round_ = 0;
  if (!problems.empty()) note(problems);
  if (failed) ++failed_saves_;
  written(saved->round, failed);
  driver_.carry_out();
}

void SaveDesk::written(uint64_t round, const std::optional<Error>& failed) {
  saving_ = false;
  if (failed) {
    failed_round_ = round;
    failed_save_.emplace(failed->code(), failed->what());
    note(fmt::format("round {} was not saved, the last that is remains round {}: {}", round,
                     durable_round_, failed->what()));
  } else {
    durable_round_ = round;
    membership_.changes().decisions().branches().saved_durably(round);
  }
  next_save_ =
      (failed ? membership_.rounds().completed() : durable_round_) + host_.checkpoints->every();
  if (last_ != LastSave::kNone) return written_without_source(round, failed);
  if (saving_end_) return continue_end();
  if (std::exchange(save_again_, false)) return save();
  if (!asked_.empty()) take_snapshot();
}

// Says so again each time that the write has taken twice as long.
void SaveDesk::say_that_disk_is_slow(uint64_t now) {
  const uint64_t took_ms = now - write_began_ms_;
  write_is_long_ms_ = now + took_ms;
  note(
      fmt::format("round {} has been on its way to the disk for {} s, the last that is saved "
                  "remains round {}: the disk is slow, or does not answer",
                  writing_round_, took_ms / 1000, durable_round_));
}

void SaveDesk::note(const std::string& what) {
  host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}': {}", job_.spec().name, what));
}

void SaveDesk::end() {
  saving_end_ = false;
  part_desk_.drop();
}

void SaveDesk::add_to(JobStatus& status) const {
  status.durable_round = durable_round_;
  status.next_saved_round = parts_.round();
  status.void_snapshots = void_snapshots_;
  status.failed_saves = failed_saves_;
}

void SaveDesk::answer(const Result<CheckpointReply>& answer) {
  for (const auto& reply : std::exchange(asked_, {})) reply(answer);
}

}  // namespace phub
