#include "phub/job/ended_jobs.h"

#include <fmt/format.h>

#include <algorithm>
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

uint64_t EndedJobs::bytes_of(const EndedJob& job) {
  uint64_t bytes = job.log ? job.log->bytes() : 0;
  for (const EndedJob::Member& member : job.members) {
    bytes += sizeof member + member.ticket.capacity() + member.lost.capacity();
  }
  return bytes;
}

EndedJob* EndedJobs::latest(const std::string& name) {
  const auto job = std::find_if(jobs_.rbegin(), jobs_.rend(),
                                [&name](const EndedJob& ended) { return ended.name == name; });
  return job == jobs_.rend() ? nullptr : &*job;
}

void EndedJobs::refuse_if_member(const Credential& who) const {
  for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
    if (job->name != who.job || who.rank >= job->members.size()) continue;
    const EndedJob::Member& member = job->members[who.rank];
    if (member.ticket.empty() || member.incarnation != who.incarnation ||
        !same_ticket(member.ticket, who.ticket)) {
      continue;
    }
    if (job->error.empty() && member.lost.empty()) {
      fail(ErrorCode::kNotFound, "rank {} has left job '{}', which has ended well since", who.rank,
           who.job);
    }
    if (job->error.empty()) {
      fail(ErrorCode::kFenced, "{}; job '{}' has ended well since, without it", member.lost,
           who.job);
    }
    if (member.lost.empty()) throw Error(job->error_code, job->error);
    fail(job->error_code, "{}; then job '{}' ended: {}", member.lost, who.job, job->error);
  }
}

std::string EndedJobs::not_found(const std::string& name) {
  const EndedJob* const job = latest(name);
  if (job == nullptr) return fmt::format("there is no job '{}'", name);
  return fmt::format("there is no job '{}' now: the last of this name {}", name,
                     job->error.empty() ? "ended well" : "ended: " + job->error);
}

void EndedJobs::refuse(const std::string& name) {
  throw Error(ErrorCode::kNotFound, not_found(name));
}

LogPage EndedJobs::log(const std::string& name, uint64_t from) {
  EndedJob* const job = latest(name);
  if (job == nullptr) refuse(name);
  if (job->log) return job->log->page(from);
  fail(ErrorCode::kNotFound, "the log of job '{}', which has ended, made room for others", name);
}

void EndedJobs::make_room(const MemoryBudget& budget) {
  for (EndedJob& job : jobs_) {
    if (budget.used() + kept_ <= budget.limit()) return;
    kept_ -= bytes_of(job);
    job.log.reset();
    job.members = {};
  }
}

void EndedJobs::tick(uint64_t now) {
  for (EndedJob& job : jobs_) {
    if (now < job.ended_ms + kKeptMs) return;
    if (job.members.empty()) continue;
    kept_ -= bytes_of(job);
    job.members = {};
    kept_ += bytes_of(job);
  }
}

}  // namespace phub
