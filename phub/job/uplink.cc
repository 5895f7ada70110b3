#include "phub/job/uplink.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phub {
namespace {

constexpr uint64_t kBetweenJoinsMs = 50;

}  // namespace

Uplink::Uplink(Parent& parent, const ServedTime& time, JoinRequest request)
    : parent_(parent),
      time_(time),
      request_(std::move(request)),
      lease_ms_(request_.spec.lease_ms) {}

Uplink::~Uplink() { drop(); }

Credential Uplink::who() const {
  return {.job = request_.spec.name,
          .rank = admission_.rank,
          .incarnation = admission_.incarnation,
          .ticket = admission_.offer.ticket,
          .epoch = admission_.epoch};
}

// --- joining -------------------------------------------------------------------------------------

void Uplink::join(Reply<Done> done) {
  joined_ = std::move(done);
  join_until_ms_ = time_.now_ms() + uint64_t{2} * lease_ms_;
  try_to_join();
}

void Uplink::try_to_join() {
  join_at_ms_ = 0;
  parent_.join(request_, guarded<JoinReply>([this](Result<JoinReply> result) {
                 const uint64_t now = time_.now_ms();
                 if (!result && result.code == ErrorCode::kTaken && now < join_until_ms_) {
                   join_at_ms_ = now + kBetweenJoinsMs;
                   return;
                 }
                 const Reply<Done> done = std::exchange(joined_, nullptr);
                 if (!result) {
                   ended_ = true;
                   return done({result.code, fmt::format("the {} at {}: {}", parent_.title(),
                                                         parent_.name(), result.message)});
                 }
                 admission_ = std::move(*result.value);
                 in_ = true;
                 answered_ms_ = now;
                 beat();  // at once: when this connection ends, so has the rack
                 done(Done{});
               }));
}

// --- its lease -----------------------------------------------------------------------------------

void Uplink::tick() {
  const uint64_t now = time_.now_ms();
  if (ended_) return;
  if (!in_) {
    if (join_at_ms_ > 0 && now >= join_at_ms_) try_to_join();
    return;
  }
  if (now - answered_ms_ > uint64_t{2} * lease_ms_) {
    return end(ErrorCode::kUnavailable,
               fmt::format("it has not answered for {} ms", now - answered_ms_));
  }
  if (!beating_ && now >= beat_at_ms_) beat();
}

// An answer that is on its way is older than the question.
void Uplink::check(std::function<void()> done) {
  if (!in_ || ended_) return;
  checks_.push_back(std::move(done));
  if (!beating_) beat();
}

void Uplink::beat() {
  beating_ = true;
  parent_.heartbeat(
      who(), guarded<Pulse>([this, asked = std::exchange(checks_, {})](Result<Pulse> result) {
        beating_ = false;
        const bool is_fine = answered(result);
        if (ended_) return;
        if (!is_fine) checks_.insert(checks_.begin(), asked.begin(), asked.end());
        if (!is_fine) return;  // the next tick asks again
        for (const auto& done : asked) done();
        if (!checks_.empty() && !beating_ && !ended_) beat();
      }),
      lease_ms_);
}

// False: there is none, or it is the end.
bool Uplink::answered(const Result<Pulse>& result) {
  const uint64_t now = time_.now_ms();
  beat_at_ms_ = now + lease_ms_ / 4;
  if (result) {
    answered_ms_ = now;
    pulse_ = *result.value;
    return true;
  }
  if (!may_pass(result.code)) {
    end(result.code == ErrorCode::kFenced ? ErrorCode::kRankLost : result.code, result.message);
  } else {
    beat_at_ms_ = now + std::min<uint64_t>(kBetweenJoinsMs, lease_ms_ / 4);
  }
  return false;
}

void Uplink::end(ErrorCode code, const std::string& why) {
  if (ended_) return;
  const Error error(code, fmt::format("the {} at {}: {}", parent_.title(), parent_.name(), why));
  end_ = error;
  drop();
  refuse_waiting(code, error.what());
  if (const auto call = std::exchange(on_end_, nullptr)) call(error);
}

void Uplink::refuse_waiting(ErrorCode code, const std::string& why) {
  for (const Reply<Done>& reply : std::exchange(barrier_, {})) reply({code, why});
  for (const auto& [number, refuse] : std::exchange(calls_, {})) refuse(code, why);
}

// --- calls ---------------------------------------------------------------------------------------

void Uplink::barrier(Reply<Done> reply) {
  if (ended_) return reply({ErrorCode::kUnavailable, kHasEnded});
  barrier_.push_back(std::move(reply));
  if (barrier_.size() > 1) return;
  parent_.barrier(who(), guarded<Done>([this](const Result<Done>& result) {
                    for (const Reply<Done>& waiting : std::exchange(barrier_, {})) waiting(result);
                  }));
}

void Uplink::reconnect(Reply<Offer> reply) {
  if (!ended_) parent_.reconnect(who(), guarded<Offer>(std::move(reply)));
}

void Uplink::tell(RackNews news) {
  news.name = parent_.rack_name();
  if (!in_ || ended_ || is_telling_ || (unanswered_.empty() && news.same_news(news_))) return;
  is_telling_ = true;
  news.number = ++told_;
  if (unanswered_.empty() || !unanswered_.back().same_news(news)) unanswered_.emplace_back();
  unanswered_.back() = news;
  parent_.tell(who(), news, guarded<Done>([this, news](const Result<Done>& result) {
                 is_telling_ = false;
                 if (!result) return;  // the parent may have them all the same
                 news_ = news;
                 unanswered_.clear();
               }));
}

std::vector<RackNews> Uplink::told() const {
  std::vector<RackNews> all{news_};
  all.insert(all.end(), unanswered_.begin(), unanswered_.end());
  return all;
}

void Uplink::leave(const RackNews& last) {
  if (ended_) return;
  ended_ = true;
  refuse_waiting(ErrorCode::kNotFound, "the job has ended");
  if (!in_) return;
  if (last.saves) {
    RackNews news = last;
    news.name = parent_.rack_name();
    parent_.tell(who(), news, [](const Result<Done>&) {});
  }
  parent_.leave(who(),
                [&parent = parent_, who = who()](const Result<Done>&) { parent.forget(who); });
}

void Uplink::abandon(const std::string& why) {
  if (ended_ || !in_) return drop();
  ended_ = true;
  refuse_waiting(ErrorCode::kRankLost, why);
  parent_.tell(who(), {.name = parent_.rack_name(), .live = {}, .failure = why},
               [&parent = parent_, who = who()](const Result<Done>&) { parent.forget(who); });
}

void Uplink::drop() {
  joined_ = nullptr;
  if (std::exchange(ended_, true) || !in_) return;
  parent_.forget(who());
}

}  // namespace phub
