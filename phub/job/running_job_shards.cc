// A running job: the parts of it that other boxes have.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>
#include <utility>
#include <vector>

#include "phub/job/running_job.h"

namespace phub {

void RunningJob::make_remote_parts(RemoteParts::Done done) {
  if (remote_.empty()) return done({});
  remote_.make({.spec = job_->spec(),
                .transport = transport_,
                .saved = job_->takes_snapshots(),
                .restored = life_.elsewhere},
               [this, done = std::move(done)](const std::optional<Error>& failed) {
                 branches_.free_beside(job_->take_docks_of_others());
                 done(failed);
               });
}

void RunningJob::handle(uint64_t shard, const ShardReport& report) {
  check_rank(report);
  if (report.kind == ShardSays::kSnapped && !ending_) check_snapped(shard, report);
  if (report.kind == ShardSays::kClosed && !ending_) close_gate(shard, report);
  if (report.kind == ShardSays::kGotState && !ending_) state_.check_got(remote_.at(shard).box);
  const std::optional<CoreReport> core = remote_.take(
      shard, report, [this](uint32_t i) -> Probe& { return meter_.probe(i); },
      membership_.boundary());
  if (report.kind == ShardSays::kProbed && job_->gate()) {
    job_->gate()->begin_elsewhere(report.round);
  }
  if (core) return handle(*core);
  if (ending_) return;
  if (report.kind == ShardSays::kFailed) membership_.failed(report.text);
  if (report.kind == ShardSays::kDisconnected) {
    return handle(TransportEvent{.kind = TransportEvent::kDisconnected,
                                 .link = &job_->link(),
                                 .rank = report.rank,
                                 .incarnation = report.incarnation});
  }
  carry_out();
}

void RunningJob::close_gate(uint64_t shard, const ShardReport& report) {
  const std::span<const uint32_t> chunks = remote_.close_round(shard, report.round);
  if (!job_->gate() || report.squares.size() != chunks.size()) {
    fail(ErrorCode::kInvalid,
         "mail: a report does not fit its job: {} squares of {} chunks in round {}",
         report.squares.size(), chunks.size(), report.round);
  }
  std::vector<double> squares;
  squares.reserve(chunks.size());
  for (const uint64_t bits : report.squares) squares.push_back(std::bit_cast<double>(bits));
  job_->gate()->close_for(chunks, squares, report.round);
}

// A box names ranks of the job; none, where a sum overflowed.
void RunningJob::check_rank(const ShardReport& report) const {
  const bool is_none = report.kind == ShardSays::kNonFinite && report.rank == CoreReport::kNoRank;
  const bool counts_ranks = report.kind == ShardSays::kViolation &&
                            report.violation == CoreReport::kParticipants && !has_racks();
  if ((is_none || report.rank < seats_.size()) && !counts_ranks) return;
  fail(ErrorCode::kInvalid, "mail: a report does not fit its job: rank {}", report.rank);
}

// What goes on is known only when the copy is here.
void RunningJob::check_snapped(uint64_t shard, const ShardReport& report) const {
  const RemoteParts::Place part = remote_.at(shard);
  const bool complete = part.copied == job_->image_of(part.box).bytes();
  if (saves_.copying_round() + 1 == report.round && complete) return;
  fail(ErrorCode::kInvalid,
       "mail: a report does not fit its job: a snapshot of round {}, of which {} bytes came",
       report.round, part.copied);
}

PartBytes RunningJob::read_copy(uint64_t shard, const CopyPlace& place) const {
  const auto copy_of = [](std::span<const std::byte> piece) {
    return PartBytes{.bytes = {reinterpret_cast<const char*>(piece.data()), piece.size()}};
  };
  if (branches_.revives(place.state)) {
    const SavedImage image = branches_.image_for(remote_.at(shard).box);
    return copy_of(image.piece(place.offset, kCopyPieceBytes));
  }
  if (place.state > 0) return state_.piece_for(remote_.at(shard).box, place);
  const SavedImage image = job_->restored_image_of(remote_.at(shard).box);
  const std::span<std::byte> piece = image.piece(place.offset, kCopyPieceBytes);
  if (!remote_.being_made() || place.round != life_.from.round || piece.empty()) {
    fail(ErrorCode::kInvalid, "a part of job '{}' goes on from no checkpoint of round {}, byte {}",
         job_->spec().name, place.round, place.offset);
  }
  return copy_of(piece);
}

void RunningJob::check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) const {
  const RemoteParts::Place part = remote_.at(shard);
  if (place.state > 0) return state_.check_copy(part.box, place, bytes);
  const SavedImage image = job_->image_of(part.box);
  const bool wanted = !ending_ && saves_.is_copying(place.round) && place.offset <= part.copied;
  if (wanted && bytes > 0 && bytes == image.piece(place.offset, kCopyPieceBytes).size()) return;
  fail(ErrorCode::kInvalid,
       "{} bytes of round {} from byte {} on are no piece of what job '{}' "
       "wants of this box now",
       bytes, place.round, place.offset, job_->spec().name);
}

// What came before is here already, and may be being written.
void RunningJob::write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece) {
  check_copy(shard, place, piece.size());
  const RemoteParts::Place part = remote_.at(shard);
  if (place.state > 0) return state_.write_copy(part.box, place, piece);
  if (place.offset < part.copied) return;
  const SavedImage image = job_->image_of(part.box);
  std::ranges::copy(std::as_bytes(std::span(piece)),
                    image.piece(place.offset, piece.size()).begin());
  remote_.copied(shard, piece.size());
}

// The job's memory there is gone, and so is the job. If it is saved, its ranks may join again: then
// it goes on from its checkpoint, over the boxes that are there.
size_t RunningJob::lose_shard(uint64_t shard) {
  const bool being_made = remote_.being_made();  // then it is not, and no core has it
  const std::optional<RemoteParts::Lost> lost = remote_.lose(shard);
  if (!lost || being_made) return 0;
  if (ending_) return 0;
  membership_.failed(fmt::format("the box '{}' had a part of it, and is lost", lost->name),
                     life_.epoch > 0 ? ErrorCode::kRewound : ErrorCode::kInternal);
  for (uint32_t i = 0; i < lost->committing; ++i) {  // what they did is not known
    membership_.committed({.type = CoreReport::kCommitted,
                           .round = membership_.boundary().round,
                           .min_round = membership_.boundary().round},
                          host_.time.now_ms());
  }
  carry_out();
  const bool waits = life_.epoch > 0 && job_->choices().on_loss == OnLoss::kWait;
  return waits ? job_->boxes() - 1 : 0;
}

}  // namespace phub
