#include "phub/job/quorum_grace.h"

#include <algorithm>
#include <cstddef>

namespace phub {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000;
constexpr uint64_t kPartOfRound = 4;

// The smallest one that `part` of all are not above. REQUIRES: there is one.
uint64_t quantile(std::vector<uint64_t>& all, double part) {
  const auto last = static_cast<double>(all.size() - 1);
  const auto at = all.begin() + static_cast<std::ptrdiff_t>(part * last + 0.5);
  std::ranges::nth_element(all, at);
  return *at;
}

}  // namespace

uint64_t quorum_grace_ms(std::vector<uint64_t> late_ns, std::vector<uint64_t> round_ns,
                         uint64_t most_ms) {
  if (late_ns.empty() || round_ns.empty()) return kLeastGraceMs;
  uint64_t most_ns = std::max(quantile(round_ns, 0.5) / kPartOfRound, kLeastGraceMs * kNsPerMs);
  if (most_ms > 0) most_ns = std::min(most_ns, most_ms * kNsPerMs);
  std::erase_if(late_ns, [most_ns](uint64_t ns) { return ns > most_ns; });
  if (late_ns.empty()) return kLeastGraceMs;  // they would be waited for in vain
  const uint64_t grace_ms = (quantile(late_ns, 0.9) + kNsPerMs - 1) / kNsPerMs;
  return std::max(grace_ms, kLeastGraceMs);
}

}  // namespace phub
