#include "worker/progress/stalls.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace phub {
namespace {

using std::chrono::milliseconds;
// A wait asks after a tenth of the progress limit, within these bounds.
constexpr uint32_t kLeastStallMs = 100, kMostStallMs = 5000;

bool is_same(const Stall& a, const Stall& b) {
  return a.rank == b.rank && a.key == b.key && a.round == b.round;
}

}  // namespace

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

StallWatch::StallWatch(LinkKeeper& keeper)
    : keeper_(keeper),
      stall_after_(
          std::clamp(keeper.options().spec.progress_limit_ms / 10, kLeastStallMs, kMostStallMs)) {}

void StallWatch::ask() {
  {
    const std::lock_guard lock(mutex_);
    if (now() < asked_at_ + stall_after_ / 2) return;
    asked_at_ = now();
  }
  std::vector<Stall> found;
  try {
    const JobStatus status = keeper_.ask(
        [this](ControlClient& client) { return client.job_status(keeper_.spec().name, kAskMs); });
    found = stalls_of(status, std::chrono::duration<double>(stall_after_).count() / 2);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): then no stall is known
  }
  const std::lock_guard lock(mutex_);
  stalls_ = std::move(found);
  any_ = !stalls_.empty();
}

void StallWatch::warn() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    uint64_t oldest = ~uint64_t{0};
    for (const Stall& stall : stalls_) {
      oldest = std::min(oldest, stall.round);
      if (std::any_of(warned_.begin(), warned_.end(),
                      [&](const Stall& other) { return is_same(stall, other); })) {
        continue;
      }
      text += fmt::format("phub: job '{}', rank {}: {}, which others have waited for {:.1f} s\n",
                          keeper_.spec().name, keeper_.credential().rank, phub::describe(stall),
                          stall.seconds);
      warned_.push_back(stall);
    }
    std::erase_if(warned_, [&](const Stall& stall) { return stall.round < oldest; });
  }
  std::fputs(text.c_str(), stderr);
}

std::string StallWatch::describe() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  if (now() > asked_at_ + 3 * stall_after_) return text;
  for (const Stall& stall : stalls_) {
    text += fmt::format("{}{} for {:.1f} s", text.empty() ? "" : "; ", phub::describe(stall),
                        stall.seconds);
  }
  return text;
}

std::optional<Error> StallWatch::passed_over(const Session& session, size_t key) const {
  if (!any_ || key == Session::kAnyKey || keeper_.spec().consistency != "bsp") return std::nullopt;
  const uint64_t furthest = session.next_round() - 1;  // that any key was pushed for
  const std::vector<KeySpec>& keys = keeper_.spec().keys;
  const std::lock_guard lock(mutex_);
  for (const Stall& stall : stalls_) {
    if (stall.rank != keeper_.credential().rank) continue;
    const auto at = std::find_if(keys.begin(), keys.end(),
                                 [&](const KeySpec& one) { return one.name == stall.key; });
    if (at == keys.end()) continue;
    const auto stalled = static_cast<size_t>(at - keys.begin());
    const bool passed = session.ready(stalled) && session.round(stalled) + 1 == stall.round;
    if (!passed || furthest <= stall.round) continue;
    return Error(ErrorCode::kInvalid,
                 fmt::format("{}, which others have waited for {:.1f} s, but has pushed round {} "
                             "already: every rank pushes every key once a round (push_null() where "
                             "the gradient is zero)",
                             phub::describe(stall), stall.seconds, furthest));
  }
  return std::nullopt;
}

std::optional<Error> StallWatch::passed_over_itself(const Session& session, size_t key) const {
  if (!any_ || !session.ready(key)) return std::nullopt;
  {
    const std::string& name = keeper_.spec().keys[key].name;
    const std::lock_guard lock(mutex_);
    if (std::none_of(stalls_.begin(), stalls_.end(),
                     [&](const Stall& stall) { return stall.key == name; })) {
      return std::nullopt;
    }
  }
  return passed_over(session, key);
}

std::string StallWatch::describe_missing() {
  ask();
  if (std::string known = describe(); !known.empty()) return known;
  try {
    const Pulse pulse = keeper_.ask(
        [&](ControlClient& client) { return client.heartbeat(keeper_.credential(), kAskMs); });
    return fmt::format("missing ranks: {}",
                       pulse.missing.empty() ? "none (all are slow)"
                                             : fmt::format("{}", fmt::join(pulse.missing, ", ")));
  } catch (const Error& error) {
    keeper_.failure().check();
    return fmt::format("the server did not tell why: {}", error.what());
  }
}

Error StallWatch::timeout_of(size_t key) {
  const JobSpec& spec = keeper_.spec();
  return {ErrorCode::kTimeout,
          fmt::format(
              "{} of job '{}' was not complete after {} ms; {}",
              key >= Session::kAnyKey ? "the round" : fmt::format("key '{}'", spec.keys[key].name),
              spec.name, keeper_.options().wait_timeout_ms, describe_missing())};
}

}  // namespace phub
