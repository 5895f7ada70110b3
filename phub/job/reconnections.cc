#include "phub/job/reconnections.h"

#include <optional>
#include <utility>

namespace phub {

Reconnections::Reconnections(const JobContext& context)
    : job_(context.job),
      membership_(context.membership),
      everywhere_(context.everywhere),
      seats_(context.seats),
      driver_(context.driver) {}

void Reconnections::begin(const Credential& who, Reply<Offer> reply) {
  if (!job_.link().can_reconnect()) {
    fail(ErrorCode::kInvalid, "this job's transport cannot make a broken connection again");
  }
  if (!membership_.is_secure(who.rank, who.incarnation) || by_rank_.contains(who.rank)) {
    fail(ErrorCode::kTaken, "rank {} is being reconnected or fenced: try again", who.rank);
  }
  by_rank_[who.rank] = {.incarnation = who.incarnation, .reply = std::move(reply)};
  for (Part* const part : everywhere_) part->detach(who.rank);
}

void Reconnections::core_answered(uint32_t rank) {
  auto at = by_rank_.find(rank);
  if (at == by_rank_.end() || ++at->second.answers < job_.all_cores()) return;
  Reconnection& reconnection = at->second;
  auto finish = [&](Result<Offer> result) {
    Reply<Offer> reply = std::move(reconnection.reply);
    by_rank_.erase(at);
    reply(std::move(result));
  };
  if (!membership_.is_secure(rank, reconnection.incarnation)) {
    return finish(
        {ErrorCode::kFenced, membership_.why_not_current(rank, reconnection.incarnation)});
  }
  if (reconnection.attaching) return finish(std::move(reconnection.offer));
  connect_again(rank, 0);
}

// One part after the other: all of them use the ticket that the first one makes. The ticket is for
// the new connections alone; the control port keeps the ticket of the join.
void Reconnections::connect_again(uint32_t rank, size_t part) {
  Reconnection& reconnection = by_rank_[rank];
  if (part == everywhere_.size()) {
    reconnection.attaching = true;
    reconnection.answers = 0;
    seats_[rank].data_ended = false;
    for (Part* const each : everywhere_) each->attach(rank, reconnection.incarnation);
    return;
  }
  everywhere_[part]->reconnect(
      rank, reconnection.incarnation, reconnection.offer,
      [this, rank, part](const std::optional<Error>& refused) {
        const auto waiting = by_rank_.find(rank);
        if (waiting == by_rank_.end() || driver_.has_ended()) return;
        const uint32_t incarnation = waiting->second.incarnation;
        const bool secure = membership_.is_secure(rank, incarnation);
        if (!refused && secure) return connect_again(rank, part + 1);
        const Reply<Offer> reply = std::move(waiting->second.reply);
        by_rank_.erase(waiting);
        if (refused) return reply({refused->code(), refused->what()});
        reply({ErrorCode::kFenced, membership_.why_not_current(rank, incarnation)});
      });
}

void Reconnections::refuse(ErrorCode code, const std::string& why) {
  for (auto& [rank, reconnection] : by_rank_) reconnection.reply({code, why});
}

}  // namespace phub
