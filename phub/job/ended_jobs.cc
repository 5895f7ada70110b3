#include "phub/job/ended_jobs.h"

#include <utility>

#include "transport/greeting.h"

namespace phub {

void EndedJobs::add(EndedJob job) {
  kept_ += bytes_of(job);
  jobs_.push_back(std::move(job));
  if (jobs_.size() <= kMostJobs) return;
  kept_ -= bytes_of(jobs_.front());
  jobs_.pop_front();
}

void EndedJobs::refuse_if_member(const Credential& who) const {
  for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
    if (job->name != who.job || who.rank >= job->members.size() || job->error.empty()) continue;
    const EndedJob::Member& member = job->members[who.rank];
    if (member.incarnation == who.incarnation && same_ticket(member.ticket, who.ticket)) {
      throw Error(job->error_code, job->error);
    }
  }
}

LogPage EndedJobs::log(const std::string& name, uint64_t from) {
  for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
    if (job->name != name) continue;
    if (job->log) return job->log->page(from);
    fail(ErrorCode::kNotFound, "the log of job '{}', which has ended, made room for others", name);
  }
  fail(ErrorCode::kNotFound, "there is no job '{}'", name);
}

void EndedJobs::make_room(const MemoryBudget& budget) {
  for (EndedJob& job : jobs_) {
    if (budget.used() + kept_ <= budget.limit()) return;
    kept_ -= bytes_of(job);
    job.log.reset();
  }
}

}  // namespace phub
