#include "phub/job/losses.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kPlain =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";

}  // namespace

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

Losses::Named& Losses::named(std::string_view name) {
  if (const auto found = by_name_.find(name); found != by_name_.end()) return found->second;
  const bool is_plain =
      std::ranges::all_of(name, [](char c) { return kPlain.find(c) != std::string_view::npos; });
  if (name.empty() || name.size() > kMostLossNameBytes || !is_plain) {
    fail(ErrorCode::kInvalid,
         "'{}' cannot name a loss: a name has 1 to {} letters, digits and '_', '-', '.', '/'",
         printable(name), kMostLossNameBytes);
  }
  if (by_name_.size() == kMostLossNames) {
    std::vector<std::string_view> names;
    for (const auto& [known, of] : by_name_) names.push_back(known);
    fail(ErrorCode::kFull, "a job has losses of at most {} names: '{}' is not one of {}",
         kMostLossNames, name, fmt::join(names, ", "));
  }
  return by_name_
      .emplace(name, Named{.entries = std::vector<Entry>(kKeptLosses + 1), .reported = {}})
      .first->second;
}

void Losses::add(uint32_t rank, uint64_t round, double loss, uint64_t most, std::string_view name) {
  if (round == 0 || round > most) {
    fail(ErrorCode::kInvalid, "a loss of round {}: it must be from 1 to {}, where the job can be",
         round, most);
  }
  auto& [entries, reported] = named(name);
  if (rank >= reported.size()) reported.resize(rank + 1);
  Entry& entry = entries[round % kKeptLosses];
  if (round <= reported[rank] || round < entry.round) return;
  reported[rank] = round;
  latest_ = std::max(latest_, round);
  if (entry.round != round) {
    Entry& replaced = entries.back();
    if (entry.round > replaced.round) replaced = entry;
    entry = {.round = round, .branch = branch_in(round)};
  }
  entry.sum += loss;
  ++entry.ranks;
}

// Some rank may be in the latest round.
bool Losses::is_over(const Entry& entry) const { return entry.round > 0 && entry.round < latest_; }

RoundLoss Losses::mean_of(const std::string& name, const Entry& entry) {
  const double mean = entry.sum / entry.ranks;
  const bool is_finite = std::isfinite(mean);
  return {.round = entry.round,
          .branch = entry.branch,
          .ranks = entry.ranks,
          .loss = is_finite ? mean : 0,
          .nonfinite = !is_finite,
          .name = name};
}

LossPage Losses::page(uint64_t from) const {
  LossPage page{.latest = latest_};
  for (const auto& [name, of] : by_name_) {
    for (const Entry& entry : of.entries) {
      const bool is_kept = entry.round + kKeptLosses > latest_;
      if (entry.round >= from && is_kept && is_over(entry)) {
        page.losses.push_back(mean_of(name, entry));
      }
    }
  }
  std::ranges::stable_sort(page.losses, {}, &RoundLoss::round);
  return page;
}

std::vector<RoundLoss> Losses::latest() const {
  std::vector<RoundLoss> all;
  for (const auto& [name, of] : by_name_) {
    const Entry* last = nullptr;
    for (const Entry& entry : of.entries) {
      if (is_over(entry) && (last == nullptr || entry.round > last->round)) last = &entry;
    }
    if (last != nullptr) all.push_back(mean_of(name, *last));
  }
  return all;
}

uint64_t Losses::bytes() const {
  uint64_t bytes = runs_.capacity() * sizeof(BranchRun);
  for (const auto& [name, of] : by_name_) {
    bytes += of.entries.capacity() * sizeof(Entry) + of.reported.capacity() * sizeof(uint64_t);
  }
  return bytes;
}

}  // namespace phub
