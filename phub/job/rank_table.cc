#include "phub/job/rank_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace phub {

using Stage = RankRecord::Stage;

RankTable::RankTable(const JobSpec& spec, const RankRange& served, uint32_t life)
    : world_size_(spec.world_size), served_(served), ranks_(spec.max_ranks) {
  constexpr uint32_t kOfOneLife = 1024;
  for (RankRecord& rank : ranks_) rank.incarnation = (life - 1) * kOfOneLife;
  for (uint32_t r = served.first; r < std::min(served.end, world_size_); ++r) {
    ranks_[r].expected = true;
    ranks_[r].first = true;
    ranks_[r].first_round = 1;
  }
}

void RankTable::restore(const Manifest& saved, const std::vector<uint64_t>& latest) {
  const uint64_t last = saved.round;
  const size_t known = std::min(ranks_.size(), saved.ranks.size());
  for (RankRecord& rank : ranks_) rank = {};
  for (uint32_t r = 0; r < known; ++r) {
    const SavedRank& was = saved.ranks[r];
    RankRecord& rank = ranks_[r];
    rank.incarnation = was.incarnation;
    rank.first_round = last + 1;
    rank.last_round = std::min(was.last_round, r < latest.size() ? latest[r] : last);
    rank.expected = was.expected;
    rank.first = was.expected;
    if (was.incarnation == 0) continue;
    rank.stage = Stage::kLost;
    rank.reason = "it has not come back since the job went on from its checkpoint";
  }
  for (size_t r = known; r < saved.ranks.size(); ++r) {
    beyond_.push_back(saved.ranks[r]);
    beyond_.back().expected = false;
  }
}

void RankTable::save(Manifest& saved) const {
  for (uint32_t r = 0; r < size(); ++r) {
    const RankRecord& rank = ranks_[r];
    if (rank.stage == Stage::kLive) saved.live_ranks.push_back(r);
    saved.ranks.push_back({.incarnation = rank.incarnation,
                           .last_round = rank.last_round,
                           .expected = rank.expected});
  }
  saved.ranks.insert(saved.ranks.end(), beyond_.begin(), beyond_.end());
}

int32_t RankTable::choose() const {
  const auto first = [this](uint32_t begin, uint32_t end, const auto& fits) -> int32_t {
    for (uint32_t r = begin; r < end; ++r) {
      if (fits(ranks_[r]) && !ranks_[r].joining) return static_cast<int32_t>(r);
    }
    return -1;
  };
  const auto is_awaited = [](const RankRecord& rank) {
    return rank.expected && rank.stage != Stage::kLive;
  };
  if (const int32_t rank = first(0, size(), is_awaited); rank >= 0) return rank;
  for (const auto& [stage, end] : {std::pair{Stage::kAbsent, std::min(world_size_, served_.end)},
                                   {Stage::kLost, served_.end},
                                   {Stage::kLeft, served_.end},
                                   {Stage::kAbsent, served_.end}}) {
    const auto is_there = [stage = stage](const RankRecord& rank) { return rank.stage == stage; };
    if (const int32_t rank = first(served_.first, end, is_there); rank >= 0) return rank;
  }
  return first(served_.first, served_.end, [](const RankRecord& rank) { return rank.losing; });
}

bool RankTable::is_current(uint32_t rank, uint32_t incarnation) const {
  return rank < ranks_.size() && ranks_[rank].incarnation == incarnation &&
         ranks_[rank].stage == Stage::kLive;
}

bool RankTable::is_secure(uint32_t rank, uint32_t incarnation) const {
  return is_current(rank, incarnation) && !ranks_[rank].losing;
}

std::string RankTable::why_not_current(uint32_t rank, uint32_t incarnation) const {
  if (rank >= ranks_.size()) return fmt::format("there is no rank {}", rank);
  const RankRecord& r = ranks_[rank];
  if (r.incarnation == incarnation && !r.reason.empty()) {
    std::string why =
        fmt::format("rank {} (incarnation {}) is out: {}", rank, incarnation, r.reason);
    if (r.stage == Stage::kLost && r.last_round > 0) {
      why += fmt::format("; the last round it took part in is {}", r.last_round);
    }
    return why;
  }
  return fmt::format("incarnation {} of rank {} was replaced", incarnation, rank);
}

std::string RankTable::why_lost(uint32_t rank, uint32_t incarnation) const {
  const RankRecord& r = ranks_[rank];
  const bool lost = r.stage == Stage::kLost && r.incarnation == incarnation;
  return lost ? why_not_current(rank, incarnation) : "";
}

std::vector<uint32_t> RankTable::missing() const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < size(); ++r) {
    if (ranks_[r].expected && ranks_[r].stage != Stage::kLive) out.push_back(r);
  }
  return out;
}

uint32_t RankTable::live() const {
  return static_cast<uint32_t>(std::ranges::count_if(ranks_, [](const RankRecord& rank) {
    return rank.stage == Stage::kLive || rank.stage == Stage::kJoining;
  }));
}

uint32_t RankTable::first() const {
  return static_cast<uint32_t>(std::ranges::count_if(ranks_, &RankRecord::first));
}

uint64_t RankTable::last_round_of_all() const {
  uint64_t last = 0;
  for (const RankRecord& rank : ranks_) last = std::max(last, rank.last_round);
  return last;
}

std::vector<RankStatus> RankTable::statuses() const {
  static constexpr const char* kStages[] = {"absent", "joining", "live", "lost", "left"};
  std::vector<RankStatus> out;
  for (uint32_t r = 0; r < size(); ++r) {
    const RankRecord& rank = ranks_[r];
    out.push_back({.rank = r,
                   .incarnation = rank.incarnation,
                   .state = kStages[static_cast<int>(rank.stage)],
                   .first_round = rank.first_round,
                   .reason = rank.reason});
  }
  return out;
}

}  // namespace phub
