#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/run.h"
#include "transport/error.h"

namespace phub {

CaseResult run_one_rank(const CaseSpec& spec, const Schedule& schedule, Progress& progress) {
  PHUB_CHECK(spec.worker.rank >= 0 && schedule.rounds > 0);
  // Whole floats: Checker wants them aligned.
  std::vector<float> reference(Checker::reference_bytes(spec.checker) / sizeof(float));
  Rank rank(spec, static_cast<uint32_t>(spec.worker.rank),
            std::as_writable_bytes(std::span(reference)));
  std::vector<double> round_us;
  MachineUse machine;
  for (uint64_t round = 1; round <= schedule.warmup + schedule.rounds; ++round) {
    rank.fill(round);
    rank.worker().barrier();
    machine.start();
    const int64_t start = monotonic_ns();
    rank.exchange();
    const int64_t end = monotonic_ns();
    if (round > schedule.warmup) {
      machine.stop();
      round_us.push_back(static_cast<double>(end - start) / 1e3);
    }
    rank.check_part(round, 0, 1);
    progress.update(fmt::format("{} rounds done", round));
  }
  CaseResult result{sizes_of(spec, rank.keys())};
  result.rounds = round_us.size();
  result.us = summarize(round_us);
  result.exchanges_per_s = static_cast<double>(result.rounds) / (result.us.total / 1e6);
  result.checked = rank.checked();
  result.wrong = rank.wrong();
  result.wrong_text = rank.wrong_text();
  result.stats = rank.worker().stats();
  result.measured = {.workers = spec.workers, .round_us = result.us.p50};
  if (const double busy = machine.busy(); !std::isnan(busy)) result.measured.machine_busy = busy;
  if (schedule.link_gbps > 0) {
    result.measured.network_us = network_us(result, schedule.link_gbps);
  }
  rank.worker().leave();
  progress.clear();
  return result;
}

}  // namespace phub
