// A running job: the reports of its cores and connections.
#include <fmt/format.h>

#include <bit>
#include <string_view>
#include <utility>

#include "phub/job/running_job.h"

namespace phub {
namespace {

// Says how a rank violated the protocol: for the log, and for the rank.
std::string violation_text(const Job& job, const CoreReport& report) {
  const auto sent = [&](std::string_view what) {
    return fmt::format("it sent {} for {}", what, job.where(report.chunk));
  };
  switch (report.violation) {
    case CoreReport::kStream:
      break;
    case CoreReport::kChunk:
      return fmt::format("it sent chunk {} on a queue that has fewer", report.said);
    case CoreReport::kKind:
      return sent(fmt::format("kind {}, which is not expected there,", report.said));
    case CoreReport::kRound:
      return sent(
          fmt::format("round (or part) {} (mod 256) in round {}", report.said, report.round));
    case CoreReport::kBytes:
      return sent(fmt::format("{} bytes, not as many as belong there,", report.said));
    case CoreReport::kInterest:
      return sent(fmt::format("round {} (mod 256)", report.said)) +
             ", which it said that it neither writes nor reads";
    case CoreReport::kWeight:
      return sent(fmt::format("a weight of {}, which is no finite number of at least 2^-126,",
                              std::bit_cast<float>(static_cast<uint32_t>(report.said))));
    case CoreReport::kParticipants:
      return sent(fmt::format("{} ranks that took part, and the rack has {},", report.said,
                              job.spec().rack_ranks[report.rank]));
    case CoreReport::kSlot:
      return sent(fmt::format(
          "a gradient to offset {}, where one of its others lies, and nobody had told it that this "
          "was taken,",
          report.said));
    case CoreReport::kPlace:
      return sent(fmt::format("a payload to offset {}, where it does not lie,", report.said));
  }
  return "it sent a batch or a frame that violates the protocol";
}

}  // namespace

void RunningJob::handle(const CoreReport& report) {
  if (report.type == CoreReport::kRemoved) {
    if (report.job != nullptr) local_.core_has_let_go();
    return;
  }
  if (report.type == CoreReport::kExcluded) {  // belongs in the log even when the job is ending
    membership_.log().exclude(report.rank, report.incarnation, report.chunk, report.round);
    return count_growth();
  }
  if (end_.has_come()) return;
  const uint64_t now = host_.time.now_ms();
  switch (report.type) {
    case CoreReport::kAdded:
    case CoreReport::kRemoved:
    case CoreReport::kExcluded:
      break;
    case CoreReport::kHeld:
      membership_.held(report, now);
      break;
    case CoreReport::kCommitted:
      membership_.committed(report, now);
      carry_out();  // its lost ranks count as lost first
      if (!end_.has_come()) saves_.finish_copy();
      if (standby_desk_ && !end_.has_come()) standby_desk_->tick();  // who is a member now
      break;
    case CoreReport::kProbed:
      probes_.answered();
      break;
    case CoreReport::kDetached:
    case CoreReport::kAttached:
      if (report.rank == CoreReport::kNoRank) {
        if (rack_) rack_->core_answered(report.type);
        break;
      }
      if (job_->rules().mirrors && report.type == CoreReport::kDetached && ending()) {
        saves_.source_detached();
        break;
      }
      reconnections_.core_answered(report.rank);
      break;
    case CoreReport::kSnapped:
      saves_.core_snapped(report.round - 1);
      break;
    case CoreReport::kGotState:
    case CoreReport::kSetState:
      state_.copied(report);
      break;
    case CoreReport::kFailed:
      membership_.failed(fmt::format("CPU {} can do no more for it: {}",
                                     job_->plan().cores[report.core].os_cpu,
                                     report.job->failure()));
      break;
    case CoreReport::kBroken:
      if (!job_->link().can_reconnect()) {
        members_.lose(report.rank, report.incarnation, "its queue pair broke");
      }
      break;
    case CoreReport::kViolation:
      members_.lose(report.rank, report.incarnation, violation_text(*job_, report));
      break;
    case CoreReport::kSwitchEnded:
    case CoreReport::kSwitchBegun:
      switch_.changed(report);
      break;
    case CoreReport::kParentBroke:
      rack_ ? rack_->link_broke() : standby_desk_->link_broke();
      break;
    case CoreReport::kDecided:
      remote_.decide(job_->gate()->decision(), job_->gate()->norms());
      break;
    case CoreReport::kQuorum:
      quorum_->is_there(now);
      break;
    case CoreReport::kClosed:  // comes from other boxes only: close_gate()
      break;
    case CoreReport::kNonFinite:
      if (rack_) {
        rack_->explain_nonfinite(non_finite_text(
            report.rank, fmt::format("{}, in round {}", job_->where(report.chunk), report.round)));
        break;
      }
      membership_.fail(
          ErrorCode::kNonFinite,
          non_finite_text(
              report.rank,
              fmt::format(
                  "{}, in round {}{}", job_->where(report.chunk), report.round,
                  report.rank == CoreReport::kNoRank && !job_->switch_offer().streams.empty()
                      ? " (or some rank's gradient that came through the switch was not)"
                      : "")));
      break;
  }
  carry_out();
}

void RunningJob::handle(const TransportEvent& event) {
  if (end_.has_come()) return;
  if (event.kind == TransportEvent::kFailed) {
    membership_.failed(event.reason);
  } else {
    members_.data_ended(event.rank, event.incarnation);
  }
  carry_out();
}

}  // namespace phub
