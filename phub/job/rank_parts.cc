#include "phub/job/rank_parts.h"

#include <fmt/format.h>

#include "transport/error.h"

namespace phub {

void RankParts::check(uint32_t rank, uint64_t round) const {
  if (round_ == 0 || round != round_) {
    fail(ErrorCode::kNotFound, "no checkpoint of round {} is being taken, {}", round,
         round_ == 0 ? "nor of any other" : fmt::format("but of round {}", round_));
  }
  if (!why_void_.empty()) {
    fail(ErrorCode::kNotFound, "there will be no checkpoint of round {}: {}", round, why_void_);
  }
  if (has(rank)) {
    fail(ErrorCode::kTaken, "rank {} has sent its part of round {} already", rank, round);
  }
}

void RankParts::make_void(const std::string& why) {
  if (why_void_.empty()) why_void_ = why;
}

std::vector<uint32_t> RankParts::missing() const {
  std::vector<uint32_t> missing;
  for (const uint32_t rank : needed_) {
    if (!has(rank)) missing.push_back(rank);
  }
  for (const auto& [rank, state] : parts_) {
    if (state == State::kComing) missing.push_back(rank);
  }
  return missing;
}

}  // namespace phub
