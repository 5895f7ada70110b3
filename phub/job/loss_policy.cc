#include "phub/job/loss_policy.h"

#include <fmt/format.h>

#include <algorithm>

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

LossPolicy::LossPolicy(const JobSpec& spec, const RankTable& ranks, const JobRounds& rounds)
    : spec_(spec), on_loss_(rules_of(spec).on_loss), ranks_(ranks), rounds_(rounds) {}

void LossPolicy::joined(Ms now) {
  if (assemble_until_ == 0) assemble_until_ = now + spec_.join_limit_ms;
}

bool LossPolicy::join_limit_is_over(Ms now) const {
  return !assembled_ && assemble_until_ != 0 && now > assemble_until_;
}

std::string LossPolicy::why_absent() const {
  return fmt::format("did not join within {} ms", spec_.join_limit_ms);
}

std::optional<Error> LossPolicy::without(const std::vector<uint32_t>& absent) const {
  const uint32_t enough = spec_.min_ranks > 0 ? spec_.min_ranks : ranks_.first();
  if (ranks_.live() < enough) {
    return Error(ErrorCode::kRankLost, fmt::format("{} {}", named(absent), why_absent()));
  }
  if (absent.front() == 0 && rounds_.lacked_initial()) {
    return Error(ErrorCode::kRankLost,
                 fmt::format("rank 0 {}; nobody else has the initial parameters", why_absent()));
  }
  return std::nullopt;
}

void LossPolicy::all_are_there() {
  assembled_ = true;
  if (!is_failing()) pause_until_ = 0;
}

uint64_t LossPolicy::expected_again(const RankLoss& loss, uint64_t boundary_round) const {
  if (!assembled_ && ranks_[loss.rank].first) return boundary_round;
  return !loss.lost || on_loss_ == OnLoss::kShrink ? kNever : rounds_.started() + 1;
}

std::string LossPolicy::lost_text(uint32_t rank, uint32_t incarnation, const std::string& reason) {
  return fmt::format("rank {} (incarnation {}) was lost: {}", rank, incarnation, reason);
}

// A rank that is lost before all first ranks have come may still be replaced, within the time that
// all of them have: no policy applies to it.
std::optional<Error> LossPolicy::lost(std::span<const RankLoss> losses, uint64_t round, Ms now) {
  for (const RankLoss& loss : losses) {
    const RankRecord& r = ranks_[loss.rank];
    if (!loss.lost || (!assembled_ && r.first)) continue;
    const std::string who = fmt::format("rank {} (incarnation {}) was lost in round {}: {}",
                                        loss.rank, r.incarnation, round, loss.reason);
    if (loss.rank == 0 && rounds_.lacked_initial() && on_loss_ != OnLoss::kWait) {
      return Error(ErrorCode::kRankLost,
                   who + "; it had not sent the initial parameters of every key yet");
    }
    if (on_loss_ == OnLoss::kFail && !is_failing()) {
      fail_after_ = rounds_.started();
      fail_message_ = who;
      pause_until_ = now + spec_.lease_ms;
    } else if (on_loss_ == OnLoss::kWait && assembled_) {
      pause_until_ = std::max(pause_until_, now + spec_.wait_limit_ms);
    }
  }
  return std::nullopt;
}

std::optional<Error> LossPolicy::overdue(Ms now, bool idle) const {
  if (is_failing() && (rounds_.in_progress() > fail_after_ || now > pause_until_)) {
    return Error(ErrorCode::kRankLost, fail_message_);
  }
  if (is_paused() && now > pause_until_ && idle) {
    return Error(ErrorCode::kRankLost, fmt::format("the job waited {} ms for {} to come back",
                                                   spec_.wait_limit_ms, named(ranks_.missing())));
  }
  return std::nullopt;
}

}  // namespace phub
