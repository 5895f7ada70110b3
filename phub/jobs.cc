#include "phub/jobs.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "transport/error.h"

namespace phub {

void Jobs::drop() {
  for (auto& [name, job] : by_name_) job->detach_all();
  for (auto& [number, job] : by_number_) job->detach_all();  // also those that are being made
  by_number_.clear();
  by_name_.clear();
}

RunningJob* Jobs::find(const std::string& name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : at->second.get();
}

RunningJob* Jobs::find(const BoxLink* link) const {
  for (const auto& [name, job] : by_name_) {
    if (&job->job().link() == link) return job.get();
  }
  return nullptr;
}

RunningJob* Jobs::find(const CoreJob* core_job) const {
  const auto at = by_core_job_.find(core_job);
  return at == by_core_job_.end() ? nullptr : at->second;
}

RunningJob& Jobs::find_running(const std::string& name) const {
  RunningJob* job = find(name);
  if (!job) host_.ended.refuse(name);
  if (job->ending()) fail(ErrorCode::kNotFound, "job '{}' is ending", name);
  return *job;
}

RunningJob& Jobs::authenticate(const Credential& who) const {
  if (who.is_admin) {
    RunningJob& job = find_running(who.job);
    job.members().check_same_life(who.epoch);
    return job;
  }
  RunningJob* job = find(who.job);
  if (!job) {
    host_.ended.refuse_if_member(who);
    if (!goes_on_.empty() && who.epoch > 0) {
      fail(ErrorCode::kRewound,
           "job '{}' does not run at this server: join again, and it goes on {}", who.job,
           goes_on_);
    }
    host_.ended.refuse(who.job);
  }
  if (const auto refused = error_of([&] { job->members().authenticate(who); })) {
    host_.ended.refuse_if_member(who);  // perhaps it was a member of an earlier job of this name
    throw Error(*refused);
  }
  return *job;
}

void Jobs::add(const std::shared_ptr<RunningJob>& job, JobOwner owner) {
  const std::string& name = job->job().spec().name;
  by_name_[name] = job;
  for (uint32_t i = 0; i < job->job().cores(); ++i) {
    by_core_job_[&job->job().core_job(i)] = job.get();
  }
  if (!owner.creator.id.empty()) owners_[name] = std::move(owner);
  find_tick();
}

RunningJob::Remains Jobs::remove(const std::string& name) {
  RunningJob& gone = *by_name_.at(name);
  for (uint32_t i = 0; i < gone.job().cores(); ++i) by_core_job_.erase(&gone.job().core_job(i));
  by_number_.erase(gone.number());
  RunningJob::Remains remains = gone.finish();
  by_name_.erase(name);
  owners_.erase(name);
  find_tick();
  return remains;
}

const JobOwner* Jobs::owner(const std::string& name) const {
  const auto at = owners_.find(name);
  return at == owners_.end() ? nullptr : &at->second;
}

JobOwner* Jobs::owner(const std::string& name) {
  const auto at = owners_.find(name);
  return at == owners_.end() ? nullptr : &at->second;
}

uint64_t Jobs::due_ms() const {
  uint64_t due = kNever;
  for (const auto& [name, job] : by_name_) due = std::min(due, job->due_ms());
  return due;
}

void Jobs::find_tick() {
  tick_ms_ = kIdleMs;
  for (const auto& [name, job] : by_name_) tick_ms_ = std::min(tick_ms_, job->tick_ms());
}

}  // namespace phub
