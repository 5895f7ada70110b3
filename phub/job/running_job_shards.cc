// A running job: the parts of it that other boxes have.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>
#include <utility>
#include <vector>

#include "phub/job/running_job.h"

namespace phub {
namespace {

void close_gate(Job& job, RemoteParts& remote, uint64_t shard, const ShardReport& report) {
  const std::span<const uint32_t> chunks = remote.close_round(shard, report.round);
  const size_t each = job.gate() ? job.gate()->numbers_per_chunk() : 0;
  if (each == 0 || report.squares.size() != each * chunks.size()) {
    fail(ErrorCode::kInvalid,
         "mail: a report does not fit its job: {} squares of {} chunks in round {}",
         report.squares.size(), chunks.size(), report.round);
  }
  std::vector<double> squares;
  squares.reserve(report.squares.size());
  for (const uint64_t bits : report.squares) squares.push_back(std::bit_cast<double>(bits));
  job.gate()->close_for(chunks, squares, report.round);
}

// A box names ranks of the job; none, where a sum overflowed.
void check_rank(const Job& job, const ShardReport& report) {
  const bool is_none = report.kind == ShardSays::kNonFinite && report.rank == CoreReport::kNoRank;
  const bool counts_ranks = report.kind == ShardSays::kViolation &&
                            report.violation == CoreReport::kParticipants &&
                            job.spec().rack_ranks.empty();
  if ((is_none || report.rank < job.spec().max_ranks) && !counts_ranks) return;
  fail(ErrorCode::kInvalid, "mail: a report does not fit its job: rank {}", report.rank);
}

}  // namespace

void RunningJob::make_remote_parts(RemoteParts::Done done) {
  if (remote_.empty()) return done({});
  const CopyPlace restored{.round = life_.from.round};
  for (uint32_t box = 1; !life_.elsewhere.empty() && box < job_->boxes(); ++box) {
    remote_.moves().begin(box, BoxMoves::Direction::kSend, restored, job_->restored_image_of(box));
  }
  remote_.make({.spec = job_->spec(),
                .transport = transport_,
                .saved = job_->takes_snapshots(),
                .restored = life_.elsewhere},
               [this, restored, done = std::move(done)](const std::optional<Error>& failed) {
                 remote_.moves().end(restored);
                 branches_.free_beside(job_->take_docks_of_others());
                 done(failed);
               });
}

void RunningJob::handle(uint64_t shard, const ShardReport& report) {
  check_rank(*job_, report);
  if (report.kind == ShardSays::kClosed && !end_.has_come()) {
    close_gate(*job_, remote_, shard, report);
  }
  const std::optional<CoreReport> core = remote_.take(
      shard, report, [this](uint32_t i) -> Probe& { return meter_.probe(i); },
      membership_.changes().boundary());
  if (report.kind == ShardSays::kProbed && job_->gate()) {
    job_->gate()->begin_elsewhere(report.round);
  }
  if (core) return handle(*core);
  if (end_.has_come()) return;
  if (report.kind == ShardSays::kFailed) membership_.failed(report.text);
  if (report.kind == ShardSays::kDisconnected) {
    return handle(TransportEvent{.kind = TransportEvent::kDisconnected,
                                 .link = &job_->link(),
                                 .rank = report.rank,
                                 .incarnation = report.incarnation});
  }
  carry_out();
}

// The job's memory there is gone, and so is the job. If it is saved, its ranks may join again: then
// it goes on from its checkpoint, over the boxes that are there.
size_t RunningJob::lose_shard(uint64_t shard) {
  const bool being_made = remote_.being_made();  // then it is not, and no core has it
  const std::optional<RemoteParts::Lost> lost = remote_.lose(shard);
  if (!lost || being_made) return 0;
  if (end_.has_come()) return 0;
  membership_.failed(fmt::format("the box '{}' had a part of it, and is lost", lost->name),
                     life_.epoch > 0 ? ErrorCode::kRewound : ErrorCode::kInternal);
  for (uint32_t i = 0; i < lost->committing; ++i) {  // for its cores, whose answers will not come
    membership_.committed({.type = CoreReport::kCommitted,
                           .round = membership_.changes().boundary().round,
                           .min_round = membership_.changes().boundary().round},
                          host_.time.now_ms());
  }
  carry_out();
  const bool waits = life_.epoch > 0 && job_->rules().on_loss == OnLoss::kWait;
  return waits ? job_->boxes() - 1 : 0;
}

}  // namespace phub
