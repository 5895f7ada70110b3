// Learners of a rack that make steps by themselves: who is cut off from the box, and whether
// somebody waits for longer than a quorum and its grace.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "tests/sim/rack.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {
namespace {

constexpr uint64_t kLookMs = 20;
// Beside the grace: for what is under way, the control thread and boundaries.
constexpr uint64_t kMarginMs = 250;

// A grace that the box chooses is at most a quarter of a round.
uint64_t most_grace_ms(const JobPlan& job) {
  if (job.spec.grace != Grace::kAuto || job.spec.grace_ms > 0) return job.spec.grace_ms;
  return job.spec.lease_ms + job.outer->longest_cycle_ms();
}

}  // namespace

void Rack::cut_off_in_time(JobRun& job) {
  if (!job.plan.outer) return;
  const std::vector<Partition>& cuts = job.plan.outer->partitions;
  for (; job.partitions < cuts.size() && cuts[job.partitions].after_pushes < job.pushes;
       ++job.partitions) {
    cut_off(job, cuts[job.partitions]);
  }
}

void Rack::cut_off(JobRun& job, const Partition& cut) {
  ++job.outer.partitions;
  job.outer.one_sided += cut.kind != Partition::kCut;
  const size_t trainers = job.trainers.size();
  for (size_t i = 0; i < trainers; ++i) {
    Trainer& trainer = *job.trainers[i];
    if (trainer.done() || !trainer.joined() || !cut.ranks.contains(trainer.rank())) continue;
    ++job.outer.cut_off;
    trainer.disturb();
    if (cut.kind != Partition::kDeaf) trainer.cut_off(true, cut.ms);
    if (cut.kind != Partition::kMute) trainer.cut_off(false, cut.ms);
    if (!cut.heals) {
      net_.after(cut.ms * kMs, [&job, &trainer] {
        job.outer.ended += !trainer.done();
        trainer.crash(true);
      });
    }
    if (!cut.followed) continue;
    start(job, {.rank = static_cast<int32_t>(trainer.rank()), .patient = true},
          random().below(cut.ms * kMs));
  }
}

// Of the job whose server this is, now and then.
void Rack::look_at_learners() {
  if (net_.now_ns() < looked_at_learners_ns_ + kLookMs * kMs) return;
  looked_at_learners_ns_ = net_.now_ns();
  for (auto& job : jobs_) {
    if (!job->plan.outer || job->ended || job->oracle.rounds() == 0) continue;
    for (uint32_t f = 0; f < fragments_of(job->spec); ++f) look_at_fragment(*job, f);
  }
}

// Who has sent a fragment is in the next of its rounds that is decided. So once as many wait as
// make a quorum, it takes no longer than the grace.
void Rack::look_at_fragment(JobRun& job, uint32_t fragment) {
  const uint64_t most_ms = most_grace_ms(job.plan) + kMarginMs;
  const auto waiting_ms = [&](const std::set<Member>* live) -> uint64_t {
    std::vector<uint64_t> since;
    for (const auto& trainer : job.trainers) {
      const auto ns = trainer->waits_since_ns(fragment);
      const Member who{trainer->rank(), trainer->incarnation()};
      if (ns && (live == nullptr || live->contains(who))) since.push_back(*ns);
    }
    if (since.size() < job.spec.quorum) return 0;
    std::ranges::nth_element(since, since.begin() + job.spec.quorum - 1);
    return (net_.now_ns() - since[job.spec.quorum - 1]) / kMs;
  };
  ++job.outer.waits;
  uint64_t ms = waiting_ms(nullptr);
  if (ms > most_ms) {  // some of them may be lost, and have not heard of it
    const std::set<Member> live = live_ranks(job);
    ms = waiting_ms(&live);
  }
  job.outer.longest_wait_ms = std::max(job.outer.longest_wait_ms, ms);
  if (ms <= most_ms) return;
  fail(fmt::format("{} fragment {}: {} ranks have waited for {} ms, the grace is {} ms\n{}",
                   job.plan.spec.name, fragment, job.spec.quorum, ms, most_ms - kMarginMs,
                   status_text()));
}

std::set<Member> Rack::live_ranks(const JobRun& job) const {
  std::set<Member> live;
  for (const JobStatus& status : server_->status().jobs) {
    if (status.name != job.plan.spec.name) continue;
    for (const RankStatus& rank : status.ranks) {
      if (rank.state == "live") live.insert({rank.rank, rank.incarnation});
    }
  }
  return live;
}

void Rack::count_learners(JobRun& job) {
  if (!job.plan.outer) return;
  OuterCounts& counts = job.outer;
  std::set<uint32_t> ranks;
  for (const LogRecord& record : job.log) {
    if (record.kind == LogRecord::Kind::kLate) counts.late += record.last_round - record.round + 1;
    if (record.kind != LogRecord::Kind::kAdmitted) continue;
    counts.joined_again += ranks.insert(record.rank).second ? 0 : 1;
  }
  counts.learners = ranks.size();
  counts.slow_learners = job.plan.outer->slow.size();
  counts.slow_links = job.plan.outer->slow_links.size();
  counts.rounds = job.oracle.rounds();
  counts.joined_late = job.late_started;
  for (size_t i = 0; i < job.plan.faults.size(); ++i) {
    if (!job.fault_done[i]) continue;
    const Fault::Kind kind = job.plan.faults[i].kind;
    counts.ended += kind == Fault::kCrash || kind == Fault::kSilentCrash;
    counts.hung += kind == Fault::kHang || kind == Fault::kBeatingHang;
  }
}

}  // namespace phub::sim
