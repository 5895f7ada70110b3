#include "phub/job/job_probes.h"

#include <vector>

#include "phub/core/index_set.h"

namespace phub {
namespace {

// A hundred times as long as a core looks at its chunks.
uint64_t walk_ms(const Job& job) {
  constexpr uint64_t kChunksPerMs = 1600;
  const uint64_t ranks = job.spec().max_ranks;
  const uint64_t words = job.rules().lock_step() ? bit_words(ranks) : (ranks + 7) / 8;
  return job.plan().chunks.size() * words / (kChunksPerMs * job.cores());
}

}  // namespace

void JobProbes::tick(uint64_t now) {
  if (out_ > 0 || now < next_ms_) return;
  const auto* const gate = job_.gate();
  const uint64_t begun = gate ? gate->begun() : 0;
  for (Part* const part : everywhere_) {
    if (part->wants_probe(begun)) active_ms_ = now;
  }
  if (active_ms_ != now) {  // the last answers still hold
    if (rates_fade(now)) collect();
    return;
  }
  next_ms_ = now + walk_ms(job_);
  out_ = job_.all_cores();
  for (Part* const part : everywhere_) part->probe(begun);
}

void JobProbes::collect() {
  const Probe all = meter_.collect(clock_.now_ms());
  std::vector<uint64_t> sent = all.arrivals;
  for (size_t r = 0; r < sent.size(); ++r) sent[r] += all.parts[r];
  job_.membership().probed(all.min_round, sent, all.waited_for, time_.now_ms());
}

}  // namespace phub
