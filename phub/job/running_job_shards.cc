// A running job: the parts of it that other boxes have.
#include <fmt/format.h>

#include <utility>

#include "phub/job/running_job.h"

namespace phub {
namespace {

std::optional<ShardDo> order_of(CoreMessage::Type type) {
  switch (type) {
    case CoreMessage::kAddJob:
      return ShardDo::kStart;
    case CoreMessage::kRemoveJob:
      return ShardDo::kRemove;
    case CoreMessage::kHold:
      return ShardDo::kHold;
    case CoreMessage::kDetach:
      return ShardDo::kDetach;
    case CoreMessage::kAttach:
      return ShardDo::kAttach;
    case CoreMessage::kCommit:  // has an order of its own, and so has a probe
    case CoreMessage::kProbe:
      break;
  }
  return std::nullopt;
}

}  // namespace

void RunningJob::make_remote_parts(RemoteParts::Done done) {
  if (remote_.empty()) return done({});
  remote_.make(job_->spec(), transport_, std::move(done));
}

void RunningJob::drop_remote_parts() { remote_.send(ShardDo::kRemove); }

void RunningJob::order(const CoreMessage& message) {
  const std::optional<ShardDo> what = order_of(message.type);
  if (what && !remote_.empty()) remote_.send(*what, message.rank, message.incarnation);
}

void RunningJob::handle(uint64_t shard, const ShardReport& report) {
  const std::optional<CoreReport> core = remote_.take(
      shard, report, [this](uint32_t i) -> Probe& { return meter_.probe(i); },
      membership_.boundary());
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

// The job's memory there is gone, and so is the job.
void RunningJob::lose_shard(uint64_t shard) {
  const bool being_made = remote_.being_made();  // then it is not, and no core has it
  const std::optional<RemoteParts::Lost> lost = remote_.lose(shard);
  if (!lost || being_made) return;
  cores_left_ -= lost->cores;
  if (ending_) return;
  membership_.failed(fmt::format("the box '{}' had a part of it, and is lost", lost->name));
  for (uint32_t i = 0; i < lost->committing; ++i) {  // what they did is not known
    membership_.committed({.type = CoreReport::kCommitted,
                           .round = membership_.boundary().round,
                           .min_round = membership_.boundary().round},
                          host_.time.now_ms());
  }
  carry_out();
}

}  // namespace phub
