// Membership: the limits of leases, of progress and of joins.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "phub/core/index_set.h"
#include "phub/job/membership.h"

namespace phub {
namespace {

// "rank 0, 2": the first of them, and how many there are besides.
std::string named(const std::vector<uint32_t>& ranks) {
  constexpr size_t kMostNamed = 20;
  const std::span<const uint32_t> first(ranks.data(), std::min(ranks.size(), kMostNamed));
  std::string text = fmt::format("rank {}", fmt::join(first, ", "));
  if (ranks.size() > kMostNamed) text += fmt::format(" … and {} more", ranks.size() - kMostNamed);
  return text;
}

}  // namespace

void Membership::probed(uint64_t min_round, const std::vector<uint64_t>& sent,
                        const std::vector<uint64_t>& waited_for, Ms now) {
  now_ = now;
  if (min_round != kNever) min_round_ = std::max(min_round_, min_round);
  waited_for_ = waited_for;
  // Before the initial parameters are here no rank can send gradients, so the cores see no rank
  // that waits.
  if (min_round == 0 && assembled_ && live() > 1) waited_for_[0] |= 1;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    const bool waited = (waited_for_[r / 64] >> (r % 64)) & 1;
    if (!waited || sent[r] != rank.sent) {
      rank.waited_since = waited ? now : 0;
    } else if (rank.waited_since == 0) {
      rank.waited_since = now;
    }
    rank.sent = sent[r];
  }
  check_limits(now);
}

// The leases and the progress of all ranks.
void Membership::check_limits(Ms now) {
  check_limits_after_ = kNever;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (rank.state != State::kLive || rank.losing) continue;
    const Ms progress_until =
        rank.waited_since == 0 ? kNever : rank.waited_since + spec_.progress_limit_ms;
    if (now > rank.lease_until) {
      lose(r, fmt::format("its lease of {} ms expired", spec_.lease_ms));
    } else if (now > progress_until) {
      lose(r, fmt::format("sent nothing for {} ms while the others waited for it",
                          now - rank.waited_since));
    } else {
      check_limits_after_ = std::min({check_limits_after_, rank.lease_until, progress_until});
    }
  }
}

void Membership::tick(Ms now) {
  now_ = now;
  if (finished_) return;
  if (now > check_limits_after_) check_limits(now);
  check_join_limit(now);
  if (finished_) return;
  if (fail_after_ != kNever && (min_round_ > fail_after_ || now > pause_until_)) {
    return fail_job(ErrorCode::kRankLost, fail_message_);
  }
  if (pause_until_ != 0 && now > pause_until_ && phase_ == Phase::kIdle) {
    fail_job(ErrorCode::kRankLost, fmt::format("the job waited {} ms for {} to come back",
                                               spec_.wait_limit_ms, named(missing())));
  }
}

// The time for all first ranks to come is over. Ranks on their way still get it.
void Membership::check_join_limit(Ms now) {
  if (assembled_ || assemble_until_ == 0 || now <= assemble_until_) return;
  if (phase_ != Phase::kIdle || !losses_.empty() || !joins_.empty()) return;
  const std::vector<uint32_t> absent = missing();
  if (absent.empty()) return;
  const std::string reason = fmt::format("did not join within {} ms", spec_.join_limit_ms);
  const uint32_t enough = spec_.min_ranks > 0 ? spec_.min_ranks : first_ranks();
  if (live() < enough) {
    return fail_job(ErrorCode::kRankLost, fmt::format("{} {}", named(absent), reason));
  }
  if (absent.front() == 0 && committed_min_round_ == 0) {
    return fail_job(ErrorCode::kRankLost,
                    fmt::format("rank 0 {}; nobody else has the initial parameters", reason));
  }
  for (const uint32_t rank : absent) forget(rank, reason);
  advance();
}

}  // namespace phub
