#include "bench/zerocompute/verdict.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/zerocompute/measures.h"
#include "transport/error.h"

namespace phub {
namespace {

// The shares from which a limit binds. Memory and network work at the same time as everything else,
// and are never used completely. A straggler is a fault rather than a limit: a quarter of the round
// is reason enough to look at it first.
constexpr double kStragglerBinds = 0.25;
// The ranks wake up one after another from the barrier before a round: so many wake-ups of lateness
// are an artefact of the measurement.
constexpr double kOwnWakeups = 10;
constexpr double kBytesBind = 0.65;
constexpr double kWakeupsBind = 0.4;
constexpr double kProcessorsBind = 0.85;
// A core that waits for a processor for this fraction shares it with others; less is chance.
constexpr double kWaitsForProcessor = 0.15;
// One of two ranks is always the later: with three the others say what is usual.
constexpr size_t kRanksToCompare = 3;

struct Straggler {
  size_t rank = 0;
  double late_us = 0;  // behind the median rank
  bool pushing = false;
};

// The rank that is furthest behind the others in pushing or in getting results, in the mean over
// many rounds: the rank that is last by chance changes every time.
Straggler slowest(const Measured& m) {
  Straggler worst;
  for (const bool pushing : {true, false}) {
    const std::vector<double>& us = pushing ? m.pushed_us : m.done_us;
    if (us.size() < kRanksToCompare) continue;
    const auto last = std::max_element(us.begin(), us.end());
    const double late_us = *last - median(us);
    if (late_us > worst.late_us) {
      worst = {static_cast<size_t>(last - us.begin()), late_us, pushing};
    }
  }
  return worst;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// The fraction of a round in which a core that lacks processors runs or waits; 0 if none lacks any.
double crowded(const Measured& m) {
  double most = 0;
  for (size_t i = 0; i < m.core_waited.size(); ++i) {
    if (m.core_waited[i] < kWaitsForProcessor) continue;
    most = std::max(most, m.core_busy[i] + m.core_waited[i]);
  }
  return most;
}

std::vector<Share> shares_of(const Measured& m) {
  std::vector<Share> shares;
  const auto add = [&](Bound bound, double share) {
    shares.push_back({bound, std::clamp(share, 0.0, 1.0)});
  };
  if (m.memory_us) add(Bound::kMemory, *m.memory_us / m.round_us);
  if (m.network_us) add(Bound::kNetwork, *m.network_us / m.round_us);
  if (m.pushed_us.size() >= kRanksToCompare) {
    add(Bound::kStraggler, slowest(m).late_us / m.round_us);
  }
  if (!m.core_busy.empty()) add(Bound::kCores, largest(m.core_busy));
  if (m.machine_busy) add(Bound::kProcessors, std::max(*m.machine_busy, crowded(m)));
  if (m.wakeups) add(Bound::kWakeups, *m.wakeups * m.wakeup_us / m.round_us);
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.share > b.share; });
  return shares;
}

bool binds(const Measured& m, Bound bound, double share) {
  switch (bound) {
    case Bound::kStraggler:
      return share >= kStragglerBinds && slowest(m).late_us > kOwnWakeups * m.wakeup_us;
    case Bound::kMemory:
    case Bound::kNetwork:
      return share >= kBytesBind;
    case Bound::kWakeups:
      return share >= kWakeupsBind;
    case Bound::kCores:
    case Bound::kProcessors:
      return share >= kProcessorsBind;
    case Bound::kUnknown:
      break;
  }
  return false;
}

std::string reason(const Measured& m, Bound bound, double share) {
  const double percent = 100 * share;
  switch (bound) {
    case Bound::kMemory:
      return fmt::format("the same reads and writes of memory alone take {:.0f}% of a round",
                         percent);
    case Bound::kNetwork:
      return fmt::format("a worker's bytes alone take its link {:.0f}% of a round", percent);
    case Bound::kStraggler: {
      const Straggler s = slowest(m);
      return fmt::format("rank {} {} {:.0f} µs after the others, {:.0f}% of a round", s.rank,
                         s.pushing ? "has pushed" : "has its results", s.late_us, percent);
    }
    case Bound::kProcessors:
      if (crowded(m) > *m.machine_busy) {
        return fmt::format("a core of the server waits for a processor for {:.0f}% of a round",
                           100 * largest(m.core_waited));
      }
      return fmt::format("the processors of this machine run for {:.0f}% of a round", percent);
    case Bound::kCores:
      return fmt::format(
          "the busiest of the server's cores runs for {:.0f}% of a round, on average they do "
          "{:.0f}%",
          percent, 100 * mean(m.core_busy));
    case Bound::kWakeups:
      return fmt::format("{:.1f} wake-ups of {:.1f} µs one after another take {:.0f}% of a round",
                         *m.wakeups, m.wakeup_us, percent);
    case Bound::kUnknown:
      break;
  }
  return "no limit that was measured accounts for the rounds";
}

}  // namespace

Verdict judge(const Measured& m) {
  PHUB_CHECK(m.round_us > 0);
  Verdict verdict{.shares = shares_of(m)};
  //     // In this order, since waiting for memory keeps processors busy, and so do wake-ups.
  for (const Bound bound : {Bound::kStraggler, Bound::kMemory, Bound::kNetwork, Bound::kWakeups,
                            Bound::kProcessors, Bound::kCores}) {
    const auto found = std::find_if(verdict.shares.begin(), verdict.shares.end(),
                                    [&](const Share& s) { return s.bound == bound; });
    if (found == verdict.shares.end() || !binds(m, bound, found->share)) continue;
    verdict.bound = bound;
    verdict.because = reason(m, bound, found->share);
    return verdict;
  }
  verdict.because = reason(m, Bound::kUnknown, 0);
  return verdict;
}

std::string_view name_of(Bound bound) {
  constexpr std::string_view kNames[] = {
      "memory bandwidth",   "network",  "one slow rank", "processors",
      "the server's cores", "wake-ups", "nothing alone"};
  return kNames[static_cast<size_t>(bound)];
}

std::string_view word_of(Bound bound) {
  constexpr std::string_view kWords[] = {"memory", "network", "straggler", "processors",
                                         "cores",  "wakeups", "unknown"};
  return kWords[static_cast<size_t>(bound)];
}

std::string_view advice(Bound bound) {
  switch (bound) {
    case Bound::kMemory:
      return "Move fewer bytes: gradients of 16 bits (--dtype bf16), an optimizer with less state. "
             "Or more memory channels and NUMA nodes, each with NICs and cores of its own.";
    case Bound::kNetwork:
      return "Faster links, or fewer bytes (--dtype bf16, --format int8). More NICs in the box do "
             "not "
             "help a worker whose own link is full.";
    case Bound::kStraggler:
      return "Look at that rank's host first: other processes, its clock rate, its link. Every "
             "rank waits for it in every round.";
    case Bound::kProcessors:
      return "Give the server's cores processors of their own: workers on other hosts, or fewer of "
             "them here, and no other programs.";
    case Bound::kCores:
      return "More cores for the server (`phub serve --cores`) if all are as busy as the busiest, "
             "else smaller chunks (--chunk-sizes), which balance better: `phub plan` shows how "
             "well.";
    case Bound::kWakeups:
      return "Rounds are too short for sleeping: exchange more per round (fewer, larger keys and "
             "chunks), or let both sides spin (processors for every worker and core; spin_us).";
    case Bound::kUnknown:
      break;
  }
  return "Measure what is missing: the memory's limit (without --no-limit), a worker's link "
         "(--link-gbps), the server's cores (a server that zerocompute starts itself). If nothing "
         "is, several share the round: try --chunk-sizes, and compare with --no-sum.";
}

}  // namespace phub
