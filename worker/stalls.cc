#include "worker/stalls.h"

#include <fmt/format.h>

namespace phub {

std::vector<Stall> stalls_of(const JobStatus& job, double least_s) {
  std::vector<Stall> stalls;
  for (const RankStatus& rank : job.ranks) {
    if (rank.waited_chunks == 0 || rank.waited_s < least_s) continue;
    stalls.push_back({.rank = rank.rank,
                      .key = rank.waited_key,
                      .round = rank.waited_round,
                      .chunks = rank.waited_chunks,
                      .seconds = rank.waited_s});
  }
  return stalls;
}

std::string describe(const Stall& stall) {
  if (stall.round == 0) {
    return fmt::format("rank {} has not sent the initial parameters", stall.rank);
  }
  return fmt::format("rank {} has not sent key '{}' of round {}", stall.rank, stall.key,
                     stall.round);
}

}  // namespace phub
