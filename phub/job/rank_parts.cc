#include "phub/job/rank_parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "transport/error.h"

namespace phub {

void RankParts::check(const PartPiece& place) const {
  const uint32_t rank = place.whose;
  const uint64_t round = place.round;
  if (round_ == 0 || round != round_) {
    fail(ErrorCode::kNotFound, "no checkpoint of round {} is being taken, {}", round,
         round_ == 0 ? "nor of any other" : fmt::format("but of round {}", round_));
  }
  if (!why_void_.empty()) {
    fail(ErrorCode::kNotFound, "there will be no checkpoint of round {}: {}", round, why_void_);
  }
  const auto found = parts_.find(rank);
  const Part part = found == parts_.end() ? Part{.all = place.all} : found->second;
  if (place.offset < part.come) {
    fail(ErrorCode::kTaken, "rank {} has sent its part of round {} already, up to byte {}", rank,
         round, part.come);
  }
  if (place.offset > part.come || place.all != part.all) {
    fail(ErrorCode::kInvalid,
         "rank {} sends byte {} of {} of its part of round {}, and byte {} of {} is the next", rank,
         place.offset, place.all, round, part.come, part.all);
  }
}

void RankParts::coming(const PartPiece& place, uint64_t bytes) {
  Part& part = parts_[place.whose];
  part.all = place.all;
  part.come += bytes;
}

bool RankParts::has(uint32_t rank) const {
  const auto found = parts_.find(rank);
  return found != parts_.end() && found->second.come == found->second.all;
}

void RankParts::make_void(const std::string& why) {
  if (why_void_.empty()) why_void_ = why;
}

void RankParts::judge(const std::vector<SaverStay>& savers, bool is_all) {
  needed_.clear();
  is_judged_ = is_all;
  for (const SaverStay& saver : savers) {
    if (!saver.covers(round_)) continue;
    if (saver.unknown) {
      make_void(
          fmt::format("the rack of rank {} was lost before it had said who took part", saver.rank));
    } else if (saver.last != 0 && !has(saver.rank)) {
      make_void(fmt::format("rank {} was lost before it had sent its part of the checkpoint",
                            saver.rank));
    }
    needed_.insert(saver.rank);
  }
  if (!is_all) return;
  for (const auto& [rank, part] : parts_) {
    if (needed_.contains(rank)) continue;
    make_void(fmt::format("rank {} has sent its part of a round that it did not finish", rank));
  }
}

std::vector<uint32_t> RankParts::awaited() const {
  std::vector<uint32_t> awaited;
  for (const uint32_t rank : needed_) {
    if (!has(rank)) awaited.push_back(rank);
  }
  return awaited;
}

bool RankParts::complete() const {
  const bool all_written = std::ranges::all_of(
      parts_, [](const auto& part) { return part.second.written == part.second.all; });
  return round_ == 0 || (is_judged_ && awaited().empty() && all_written);
}

}  // namespace phub
