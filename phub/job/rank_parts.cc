#include "phub/job/rank_parts.h"

#include <fmt/format.h>

#include <algorithm>

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

std::vector<uint32_t> RankParts::awaited() const {
  std::vector<uint32_t> awaited;
  for (const uint32_t rank : needed_) {
    if (!has(rank)) awaited.push_back(rank);
  }
  return awaited;
}

bool RankParts::complete() const {
  return awaited().empty() && std::ranges::all_of(parts_, [](const auto& part) {
           return part.second == State::kWritten;
         });
}

}  // namespace phub
