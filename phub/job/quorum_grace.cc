#include "phub/job/quorum_grace.h"

#include <algorithm>
#include <cmath>

namespace phub {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000;
constexpr uint64_t kPartOfRound = 4;

// The one that has about `part` of the others below it. REQUIRES: there is one.
uint64_t quantile(std::vector<uint64_t>& all, double part) {
  const auto last = static_cast<double>(all.size() - 1);
  const auto at = all.begin() + std::lround(part * last);
  std::ranges::nth_element(all, at);
  return *at;
}

}  // namespace

uint64_t quorum_grace_ms(std::vector<uint64_t> late_ns, std::vector<uint64_t> round_ns,
                         uint64_t most_ms) {
  if (late_ns.empty() || round_ns.empty()) return 0;
  uint64_t most_ns = quantile(round_ns, 0.5) / kPartOfRound;
  if (most_ms > 0) most_ns = std::min(most_ns, most_ms * kNsPerMs);
  std::erase_if(late_ns, [most_ns](uint64_t ns) { return ns > most_ns; });
  if (late_ns.empty()) return 0;  // they would be waited for in vain
  return (quantile(late_ns, 0.9) + kNsPerMs - 1) / kNsPerMs;
}

}  // namespace phub
