// How a rack ends: when it is over, and whether everything that happened is explained.
#include <fmt/format.h>

#include <algorithm>

#include "tests/sim/rack.h"
#include "tests/sim/virtual_clock.h"
#include "transport/control/key_schedules.h"

namespace phub::sim {
namespace {

bool ends_with_box(const LogRecord& record) {
  return record.reason.find("the box 'box") != record.reason.npos;
}

uint64_t most_ms_of_learners(const JobPlan& job) {
  const uint64_t harms = job.faults.size() + job.outer->partitions.size();
  return 2 * (job.rounds + 4) * job.outer->longest_cycle_ms() +
         4 * uint64_t{job.spec.progress_limit_ms} + 4 * job.spec.lease_ms * (harms + 1);
}

}  // namespace

bool Rack::finished() const {
  if (!server_) return false;
  if (!std::ranges::all_of(shards_, [](const auto& shard) { return shard->idle(); })) return false;
  if (!std::ranges::all_of(trainers_, &Trainer::done)) return false;
  for (const auto& rack : below_) {
    if (rack->server() == nullptr) return false;
    const ServerStatus status = rack->server()->status();
    if (!status.jobs.empty() || status.memory_bytes != 0) return false;
  }
  // One whose process died may be waiting for a box that is gone: until its job's wait limit.
  if (unanswered() != 0) return false;
  return std::ranges::all_of(jobs_,
                             [](const auto& job) { return job->starting == 0 && job->ended; }) &&
         server_->status().jobs.empty() && server_->status().memory_bytes == 0;
}

uint64_t Rack::unanswered() const {
  uint64_t all = control_.unanswered();
  for (const auto& rack : below_) all += rack->control().unanswered();
  return all;
}

// Far more than any run needs in which every wait has its bound.
uint64_t Rack::limit_ns() const {
  uint64_t ms = 5'000;
  for (const auto& job : jobs_) ms += 1'500 * (job->plan.faults.size() + 1);
  ms += 1'500 * plan_.box_faults.size() + 30'000 * plan_.shard_faults.size();
  ms += 5'000 * plan_.rack_faults.size();
  // What has a budget takes its time: a write of a chunk, of a worker.
  if (plan_.worker_bytes_per_s + plan_.box_bytes_per_s + plan_.uplink_bytes_per_s > 0) {
    for (const auto& job : jobs_) ms += 50 * job->plan.rounds;
  }
  for (const auto& job : jobs_) {
    if (job->plan.outer) ms += most_ms_of_learners(job->plan);
  }
  // Where packets are lost on both ways, a part is sent again and again.
  if (switch_) ms += 200 * jobs_.front()->plan.rounds;
  return ms * kMs;
}

std::string Rack::status_text() {
  std::string text;
  for (const auto& job : jobs_) {
    text += fmt::format("  {}: {}, {} starting, {} pushes\n", job->plan.spec.name,
                        job->ended ? "ended" : "not ended", job->starting, job->pushes);
  }
  if (!server_) return text + "  the box is dead\n";
  for (const JobStatus& job : server_->status().jobs) {
    text += fmt::format("  {}: {}, round {} complete", job.name, job.state, job.completed_round);
    for (uint32_t rank : job.waiting_for) text += fmt::format(", waits for {}", rank);
    for (const RankStatus& rank : job.ranks) {
      text += fmt::format("\n    rank {}.{}: {} from {} {}", rank.rank, rank.incarnation,
                          rank.state, rank.first_round, rank.reason);
    }
    text += "\n";
  }
  for (const Trainer* t : trainers_) text += "  " + t->describe() + "\n";
  return text;
}

void Rack::check_end(RackResult& result) {
  for (auto& job : jobs_) {
    result.observations += job->oracle.observations();
    result.states += job->oracle.states();
    if (!job->plan.box_of.empty() && !job->log_lost) join_logs_of(*job, result);
    for (const LogRecord& record : job->log) {
      result.lost += record.kind == LogRecord::Kind::kLost;
      result.admitted += record.kind == LogRecord::Kind::kAdmitted;
      result.failed_jobs += record.kind == LogRecord::Kind::kFailed;
      result.dead_devices += record.reason.find("simulated device") != std::string::npos;
    }
    count_learners(*job);
    result.outer.add(job->outer);
    result.restored += job->restored;
    result.spread_jobs += job->spread;
    result.switched_jobs += switch_ && job == jobs_.front();
    result.switch_chunks += job->switch_chunks;
    if (switch_ && job == jobs_.front()) result.switch_generations += switch_->generations();
    result.rewinds += job->rewinds;
    result.parts_restored += job->parts_restored;
    if (job->plan.levels > 0) result.parts_restored_below += job->parts_restored;
    result.coded_jobs += has_coded_keys(job->spec);
    result.jobs_of_schedules += KeySchedules(job->spec).all().empty() ? 0 : 1;
    result.jobs_of_factors += std::ranges::any_of(job->spec.keys, is_factors) ? 1 : 0;
    result.jobs_of_interest += job->plan.interest.empty() ? 0 : 1;
    result.jobs_of_rows += std::ranges::any_of(job->spec.keys, is_rows) ? 1 : 0;
    result.lazy_jobs += std::ranges::any_of(job->spec.keys, &KeySpec::lazy) ? 1 : 0;
    result.jobs_of_differences += difference_format(job->spec) ? 1 : 0;
    result.residuals_restored += job->residuals_restored;
    result.chunks_carried += job->carried;
    result.void_snapshots += job->void_snapshots;
    if (!failure_.empty()) continue;
    // What a box that was lost did in its last boundary is not in the log.
    const bool lost_box = std::ranges::any_of(job->log, ends_with_box);
    result.ended_shards += lost_box;
    if (!job->log_lost && !lost_box) fail(job->oracle.check(job->log));
    result.forks += job->oracle.forks();
    result.switches += job->oracle.switches();
    result.kills += job->kills;
    result.revivals += job->revivals;
    result.spread_kills += job->spread ? job->kills : 0;
    result.spread_revivals += job->spread ? job->revivals : 0;
    result.revived_runs += job->oracle.revived_runs();
    result.restored_with_branches += job->oracle.restored_with_branches();
    if (failure_.empty()) fail(check_outcomes(*job));
  }
  result.box_deaths = life_ - 1;
  result.boxes_below_died = box_deaths_below_;
  if (failure_.empty() && unanswered() != 0) {
    fail(fmt::format("{} control requests were never answered", unanswered()));
  }
}

// What happened to the ranks is in the logs of their boxes.
void Rack::join_logs_of(JobRun& job, RackResult& result) {
  ++result.racked_jobs;
  for (const LogRecord& record : job.log) {
    result.racks_lost += record.kind == LogRecord::Kind::kLost;
    result.racks_admitted += record.kind == LogRecord::Kind::kAdmitted;
  }
  try {
    job.log = join_logs(job.plan.spec, job.plan.levels, job.log, job.life, job.logs_below);
  } catch (const Error& error) {
    fail(job.plan.spec.name + ": " + error.what());
  }
}

std::string Rack::check_outcomes(const JobRun& job) const {
  const auto is_failure = [](const LogRecord& r) { return r.kind == LogRecord::Kind::kFailed; };
  const bool failed = std::ranges::any_of(job.log, is_failure) ||
                      std::ranges::any_of(job.logs_below, [&](const BoxLog& log) {
                        return std::ranges::any_of(log.records, is_failure);
                      });
  for (const auto& trainer : job.trainers) {
    if (trainer->error()) {
      const bool lived_on = job.rewinds > 0;  // its earlier lives failed
      const std::string wrong = check_error(job, *trainer, failed || lived_on);
      if (!wrong.empty()) return wrong;
    } else if (!trainer->left() && !trainer->crashed()) {
      return job.plan.spec.name + ": not done: " + trainer->describe();
    } else if (trainer->left() && !trainer->disturbed() && !trainer->finished_rounds()) {
      return job.plan.spec.name + ": left too early: " + trainer->describe();
    }
  }
  if (plan_.clean && (failed || job.log.size() < 2 * job.plan.spec.world_size)) {
    return job.plan.spec.name + ": nothing was wrong, and yet it did not end well";
  }
  return "";
}

// An error must be of a kind that something which happened explains, and name the rank.
std::string Rack::check_error(const JobRun& job, const Trainer& trainer, bool failed) const {
  const Error& error = *trainer.error();
  const std::string what = error.what();
  const bool control = plan_.control_loss > 0 || plan_.control_duplicate > 0;
  const bool out = trainer.disturbed() || job.taken_over.contains(trainer.rank());
  const bool of_shard =
      what.find("box 'box") != what.npos || what.find("it serves no more") != what.npos;
  bool explained = of_shard && !plan_.shard_faults.empty();
  const bool rack_may_go = !job.plan.box_of.empty();
  const bool rack_lost = rack_may_go && !plan_.rack_faults.empty();
  // What is in a switch the box does not see: where a rank hangs, it may take another for it.
  const bool waited_for = what.find("while the others waited for it") != what.npos;
  const bool hidden =
      waited_for && switch_ && &job == jobs_.front().get() && !job.plan.faults.empty();
  // A rank whose connections broke sends nothing while a shard that has to take it again hangs.
  const bool kept_out =
      waited_for && std::ranges::any_of(plan_.shard_faults, [&](const auto& fault) {
        return fault.hangs && fault.ms > job.plan.spec.progress_limit_ms;
      });
  // With a quorum ranks come to the last round at different times. Who stays holds others up that
  // need it for theirs; who is far behind is late for ever.
  const bool by_quorum = job.plan.spec.quorum > 0 && ((waited_for && trainer.finished_rounds()) ||
                                                      what.find("rounds in a row") != what.npos);
  switch (error.code()) {
    case ErrorCode::kFenced:
      explained |= out || control || failed || rack_lost || hidden || kept_out || by_quorum;
      break;
    case ErrorCode::kUnauthorized:  // replaced before it connected, or another job of this name
      // Or at a box that has died, of which the server did not hear before it died, too.
      explained |= out || failed || rack_lost || (life_ > 1 && !plan_.shard_faults.empty());
      break;
    case ErrorCode::kRankLost:
      explained |= failed && (what.find("rank ") != what.npos || life_ > 1 || rack_lost);
      // It was lost, and so was the job: the others had left before it could begin.
      explained |= out && what.find("before it could begin") != what.npos;
      break;
    case ErrorCode::kNonFinite:
      explained |= std::ranges::any_of(job.plan.bad, [&](const BadGradient& bad) {
        // Of other racks a rank hears by their number.
        return bad.kind == BadGradient::kOverflow || !job.plan.box_of.empty() ||
               what.find("came through the switch") != what.npos ||
               what.find(fmt::format("rank {} ", bad.rank)) != what.npos;
      });
      break;
    case ErrorCode::kRewound:  // it would join again, and the job has ended meanwhile
      explained |= !trainer.joined() && job.ended && rack_lost;
      break;
    case ErrorCode::kTaken:
    case ErrorCode::kFull:
    case ErrorCode::kNotFound:
      explained |= !trainer.joined() || out || control || failed || life_ > 1 || rack_lost;
      break;
    case ErrorCode::kInvalid:  // no checkpoint that there is can be read
    case ErrorCode::kInternal:
      if ((!trainer.joined() || trainer.lacks_part()) &&
          what.find("Input/output error") != what.npos) {
        return plan_.disk_faults.empty() ? "the disk failed: " + trainer.describe() : "";
      }
      explained |= failed && job.device_failed && what.find("simulated device") != what.npos;
      break;
    case ErrorCode::kMismatch:  // a rack began the job again for those who were there before
      explained |= rack_may_go && life_ > 1;
      break;
    case ErrorCode::kUnavailable:
      explained |= (!trainer.joined() && life_ > 1) || rack_lost || (control && rack_may_go);
      // A full disk holds up the first join of a job for longer than the trainer waits.
      explained |= !trainer.joined() && !plan_.disk_faults.empty() &&
                   what.find("nothing can be written") != what.npos;
      break;
    case ErrorCode::kTimeout:
      explained |= !trainer.joined() && (control || rack_lost);
      break;
    default:
      break;
  }
  if (explained && (!plan_.clean || by_quorum)) return "";
  return fmt::format("{}: nothing explains the end of {}", job.plan.spec.name, trainer.describe());
}

}  // namespace phub::sim
