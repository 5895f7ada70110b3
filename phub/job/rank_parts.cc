#include "phub/job/rank_parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "transport/error.h"

namespace phub {

void RankParts::check(uint32_t rank, const PartPiece& place) const {
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

void RankParts::coming(uint32_t rank, const PartPiece& place, uint64_t bytes) {
  Part& part = parts_[rank];
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

std::vector<uint32_t> RankParts::awaited() const {
  std::vector<uint32_t> awaited;
  for (const uint32_t rank : needed_) {
    if (!has(rank)) awaited.push_back(rank);
  }
  return awaited;
}

bool RankParts::complete() const {
  return awaited().empty() && std::ranges::all_of(parts_, [](const auto& part) {
           return part.second.written == part.second.all;
         });
}

}  // namespace phub
