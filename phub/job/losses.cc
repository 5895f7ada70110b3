#include "phub/job/losses.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "transport/error.h"

namespace phub {

void Losses::learn(std::span<const BranchRun> runs) {
  std::erase_if(runs_, [&](const BranchRun& run) { return run.round >= runs.front().round; });
  runs_.insert(runs_.end(), runs.begin(), runs.end());
  forget_runs(std::max(latest_, runs.front().round));
}

// Those that ended before every round that is kept when this one is reported.
void Losses::forget_runs(uint64_t newest) {
  const uint64_t lowest = newest > kKeptLosses ? newest - kKeptLosses + 1 : 1;
  const auto kept = std::ranges::upper_bound(runs_, lowest, {}, &BranchRun::round);
  if (kept != runs_.begin()) runs_.erase(runs_.begin(), std::prev(kept));
}

uint32_t Losses::branch_in(uint64_t round) const {
  const auto after = std::ranges::upper_bound(runs_, round, {}, &BranchRun::round);
  return after == runs_.begin() ? runs_.front().branch : std::prev(after)->branch;
}

void Losses::add(uint32_t rank, uint64_t round, double loss, uint64_t most) {
  if (round == 0 || round > most) {
    fail(ErrorCode::kInvalid, "a loss of round {}: it must be from 1 to {}, where the job can be",
         round, most);
  }
  if (entries_.empty()) entries_.resize(kKeptLosses);
  if (rank >= reported_.size()) reported_.resize(rank + 1);
  Entry& entry = entries_[round % kKeptLosses];
  if (round <= reported_[rank] || round < entry.round) return;
  reported_[rank] = round;
  latest_ = std::max(latest_, round);
  if (entry.round != round) entry = {.round = round, .branch = branch_in(round)};
  entry.sum += loss;
  ++entry.ranks;
}

LossPage Losses::page(uint64_t from) const {
  LossPage page{.latest = latest_};
  for (const Entry& entry : entries_) {
    if (entry.round == 0 || entry.round < from || entry.round >= latest_) continue;
    if (entry.round + kKeptLosses <= latest_) continue;  // no rank reported the round in its place
    const double mean = entry.sum / entry.ranks;
    const bool is_finite = std::isfinite(mean);
    page.losses.push_back({.round = entry.round,
                           .branch = entry.branch,
                           .ranks = entry.ranks,
                           .loss = is_finite ? mean : 0,
                           .nonfinite = !is_finite});
  }
  std::ranges::sort(page.losses, {}, &RoundLoss::round);
  return page;
}

uint64_t Losses::bytes() const {
  return entries_.capacity() * sizeof(Entry) + reported_.capacity() * sizeof(uint64_t) +
         runs_.capacity() * sizeof(BranchRun);
}

}  // namespace phub
