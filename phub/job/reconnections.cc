#include "phub/job/reconnections.h"

#include <optional>
#include <utility>

namespace phub {

Reconnections::Reconnections(const JobContext& context)
    : job_(context.job),
      ranks_(context.membership.ranks()),
      everywhere_(context.everywhere),
      seats_(context.seats),
      driver_(context.driver) {}

void Reconnections::begin(const Credential& who, Reply<Offer> reply) {
  if (!job_.link().can_reconnect()) {
    fail(ErrorCode::kInvalid, "this job's transport cannot make a broken connection again");
  }
  if (!ranks_.is_secure(who.rank, who.incarnation) || by_rank_.contains(who.rank)) {
    fail(ErrorCode::kTaken, "rank {} is being reconnected or fenced: try again", who.rank);
  }
  by_rank_[who.rank].reply = std::move(reply);
  answer<Offer>(connect_again(who.rank, who.incarnation),
                [this, rank = who.rank](Result<Offer> made) {
                  if (driver_.has_ended()) return;  // refuse() has replied
                  const auto reconnection = by_rank_.extract(rank);
                  reconnection.mapped().reply(std::move(made));
                });
}

// One part after the other: all of them use the ticket that the first one makes. The ticket is for
// the new connections alone; the control port keeps the ticket of the join.
Task<Offer> Reconnections::connect_again(uint32_t rank, uint32_t incarnation) {
  Event& all_answered = by_rank_[rank].all_answered;
  for (Part* const part : everywhere_) part->detach(rank);
  co_await all_answered.next();
  check_secure(rank, incarnation);
  Offer offer;
  for (Part* const part : everywhere_) {
    const auto ask = [&](Part::Done done) {
      part->reconnect(rank, incarnation, offer, std::move(done));
    };
    if (const auto refused = co_await outcome_of(ask)) throw Error(*refused);
    check_secure(rank, incarnation);
  }
  seats_[rank].data_ended = false;
  for (Part* const part : everywhere_) part->attach(rank, incarnation);
  co_await all_answered.next();
  check_secure(rank, incarnation);
  co_return offer;
}

void Reconnections::check_secure(uint32_t rank, uint32_t incarnation) const {
  if (driver_.has_ended()) fail(ErrorCode::kFenced, "the job has ended");
  if (ranks_.is_secure(rank, incarnation)) return;
  throw Error(ErrorCode::kFenced, ranks_.why_not_current(rank, incarnation));
}

void Reconnections::core_answered(uint32_t rank) {
  const auto at = by_rank_.find(rank);
  if (at == by_rank_.end() || ++at->second.answers < job_.all_cores()) return;
  at->second.answers = 0;
  at->second.all_answered.happen();
}

void Reconnections::refuse(ErrorCode code, const std::string& why) {
  for (auto& [rank, reconnection] : by_rank_) reconnection.reply({code, why});
}

}  // namespace phub
