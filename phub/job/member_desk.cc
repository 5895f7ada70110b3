#include "phub/job/member_desk.h"

#include <fmt/format.h>

#include <memory>
#include <optional>

#include "transport/greeting.h"

namespace phub {

MemberDesk::MemberDesk(const JobContext& context, const std::string& transport, Savers& savers,
                       PartDesk& parts, SaveDesk& saves, RackDesk* rack, StandbyDesk* standby,
                       Remarks& remarks)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      ranks_(membership_.ranks()),
      seats_(context.seats),
      requests_(context.requests),
      life_(context.life),
      driver_(context.driver),
      transport_(transport),
      savers_(savers),
      parts_(parts),
      saves_(saves),
      rack_(rack),
      standby_(standby),
      remarks_(remarks) {}

// --- joins ---------------------------------------------------------------------------------------

void MemberDesk::check_life(uint64_t epoch) const {
  const std::string& name = job_.spec().name;
  if (epoch > life_.epoch) {
    fail(ErrorCode::kFenced,
         "this worker was in a later life of job '{}' than this server has: another one has taken "
         "it over",
         name);
  }
  if (epoch > 0 && epoch <= life_.ended) {
    fail(ErrorCode::kNotFound, "job '{}', which this worker was in, has ended; this is another one",
         name);
  }
}

void MemberDesk::check_same(const JobSpec& spec, const std::string& transport) const {
  if (spec.mirrors && !job_.rules().mirrors) {
    fail(ErrorCode::kUnavailable,
         "job '{}' goes on at this standby already, as its box was lost: its ranks join here",
         spec.name);
  }
  if (!spec.mirrors && job_.rules().mirrors) {
    fail(ErrorCode::kUnavailable,
         "this box stands by for the box of job '{}': its ranks join there", spec.name);
  }
  JobSpec mine = job_.spec();
  mine.rank_hosts = spec.rank_hosts;  // a rank may be at another machine by now
  const std::string different = difference(spec, mine);
  if (!different.empty()) {
    fail(ErrorCode::kMismatch, "job '{}' is there already and differs: {}", spec.name, different);
  }
  if (transport_ == transport) return;
  if (!spec.rack_ranks.empty()) {
    fail(ErrorCode::kMismatch,
         "job '{}' runs over {}, this rack asks for {}: give all of its racks the same "
         "--parent-transport (tcp, verbs or ofi), or auto",
         spec.name, transport_, transport);
  }
  fail(ErrorCode::kMismatch,
       "job '{}' runs over {}, this worker asks for {}: where some workers are on the server's "
       "host and some are not, set PHUB_TRANSPORT to the same (tcp, verbs or ofi) for all",
       spec.name, transport_, transport);
}

void MemberDesk::check_same_life(uint64_t epoch) const {
  check_life(epoch);
  if (epoch != 0 && epoch < life_.epoch) {
    fail(
        ErrorCode::kRewound,
        "job '{}' has gone on from its checkpoint: join again; a program that is none of its ranks "
        "looks anew at what the job has",
        job_.spec().name);
  }
}

void MemberDesk::join(const JoinRequest& request, Reply<JoinReply> reply) {
  const std::string& id = request.id;
  for (auto& [token, waiting] : joins_) {
    if (id.empty() || waiting.id != id || waiting.caller.id != request.caller.id) continue;
    waiting.replies.push_back(std::move(reply));
    return;
  }
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (id.empty() || seat.id != id || !ranks_.is_secure(rank, seat.incarnation)) continue;
    if (seat.caller.id != request.caller.id) continue;
    answer_join(rank, {std::move(reply)});
    return;
  }
  if (host_.checkpoints && request.saves) SavedJobs::check_own_states(job_.spec());
  const uint64_t token = requests_.new_token();
  joins_[token] = {id,
                   request.caller,
                   request.saves,
                   request.interest,
                   request.spec.rank_hosts,
                   {std::move(reply)}};
  if (request.saves && savers_.must_tell_parent()) {
    return rack_->delay_join(token, request.rank, request.replace);
  }
  membership_.join(token, request.rank, request.replace, host_.time.now_ms());
  driver_.carry_out();
}

void MemberDesk::answer_join(const MembershipAction& action) {
  WaitingJoin waiting = std::move(joins_.extract(action.token).mapped());
  if (!action.ok) {
    for (const Reply<JoinReply>& reply : waiting.replies) reply({action.code, action.message});
    return;
  }
  Seat& seat = seats_[action.rank];
  seat.id = std::move(waiting.id);
  seat.caller = std::move(waiting.caller);
  seat.first_round = action.first_round;
  seat.send_initial = action.send_initial;
  if (action.rank < waiting.hosts.size()) {
    remarks_.note_machine(action.rank, waiting.hosts[action.rank]);
  }
  answer_join(action.rank, std::move(waiting.replies));
}

Story MemberDesk::answer_join(uint32_t rank, std::vector<Reply<JoinReply>> replies) {
  const Seat& seat = seats_[rank];  // until the first co_await
  const uint32_t incarnation = seat.incarnation;
  const auto whose = answering_.emplace(rank, incarnation);
  JoinReply answer{.rank = rank,
                   .incarnation = incarnation,
                   .first_round = seat.first_round,
                   .send_initial = seat.send_initial,
                   .offer = seat.offer,
                   .epoch = life_.epoch,
                   .parts = parts_.parts_for(rank),
                   .interest = seat.interest};
  // A rank that comes later has ended the generation that the others were in.
  if (rank < job_.switch_offer().workers) {
    answer.through_switch = job_.switch_offer();
    answer.through_switch.later = seat.first_round != life_.durable_round + 1;
  }
  if (seat.saves || !job_.spec().rack_ranks.empty()) answer.save_every = savers_.every();
  const auto compose = [&] {
    answer.layout = routes_of(job_.whole_plan());
    answer.spec = job_.spec();
  };
  const std::optional<Error> failed = co_await beside(driver_, host_.coder, compose);
  if (failed) join_unanswered(rank, incarnation);
  std::optional<Error> refused = failed;
  if (!refused && driver_.has_ended() && !driver_.end().is_good()) {
    refused.emplace(driver_.end().code(), driver_.end().error());
  }
  Result<JoinReply> result = refused ? Result<JoinReply>(refused->code(), refused->what())
                                     : Result<JoinReply>(std::move(answer));
  for (size_t i = 0; i + 1 < replies.size(); ++i) replies[i](result);
  if (!replies.empty()) replies.back()(std::move(result));
  // Behind the encoding of the replies: from now on the rank has a lease to keep.
  const auto nothing = [] {};
  co_await beside(driver_, host_.coder, nothing);
  answering_.erase(whose);
  if (!ranks_.is_secure(rank, incarnation)) co_return;
  membership_.leases().renew(rank, host_.time.now_ms());
}

// A loss, not a leave: a job whose ranks are lost goes on later.
void MemberDesk::join_unanswered(uint32_t rank, uint32_t incarnation) {
  if (driver_.has_ended()) return;
  lose(rank, incarnation, "the answer to its join could not be made: no memory is left");
  driver_.carry_out();
}

// --- calls of members ----------------------------------------------------------------------------

void MemberDesk::authenticate(const Credential& who) {
  check_same_life(who.epoch);
  if (who.rank >= seats_.size()) {
    fail(ErrorCode::kNotFound, "job '{}' has no rank {}", who.job, who.rank);
  }
  Seat& seat = seats_[who.rank];
  if (seat.incarnation == who.incarnation && !same_ticket(seat.offer.ticket, who.ticket)) {
    fail(ErrorCode::kUnauthorized, "this is not the ticket of rank {} of job '{}'", who.rank,
         who.job);
  }
  if (driver_.has_ended() && !driver_.end().is_good()) {
    throw Error(driver_.end().code(), driver_.end().error());
  }
  if (driver_.has_ended() || !ranks_.is_current(who.rank, who.incarnation)) {
    throw Error(ErrorCode::kFenced, ranks_.why_not_current(who.rank, who.incarnation));
  }
  seat.control_ended = false;
}

Pulse MemberDesk::heartbeat(uint32_t rank) {
  check_source_is_there();
  membership_.leases().renew(rank, host_.time.now_ms());
  return {.completed_round = membership_.rounds().completed(),
          .durable_round = saves_.durable_round(),
          .missing = ranks_.missing(),
          .assembling = !membership_.assembled(),
          .standby_lost = standby_ != nullptr && standby_->is_lost()};
}

void MemberDesk::take_news(uint32_t rank, RackNews news) {
  const bool is_rack = !job_.spec().rack_ranks.empty();
  if (!is_rack && news.failure.empty()) {
    fail(ErrorCode::kInvalid, "the ranks of job '{}' are not racks", job_.spec().name);
  }
  if (is_rack) savers_.check_news(rank, news);
  const bool has_incarnations = job_.rules().mirrors && news.failure.empty();
  if (news.incarnations.size() != (has_incarnations ? news.live.size() : 0)) {
    fail(ErrorCode::kInvalid, "incarnations: there are {}, with {} live ranks",
         news.incarnations.size(), news.live.size());
  }
  Seat& seat = seats_[rank];
  const std::string failure = std::exchange(news.failure, "");
  if (failure.empty() && job_.rules().mirrors) return take_members(seat, std::move(news));
  if (failure.empty()) {
    savers_.take_news(rank, news);
    seat.rack = std::move(news);
    return saves_.check_parts();
  }
  if (!job_.rules().mirrors) seat.rack.live.clear();
  lose(rank, seat.incarnation,
       is_rack ? fmt::format("rack '{}': {}", news.name, failure) : failure);
  driver_.carry_out();
}

void MemberDesk::check_source_is_there() const {
  if (const std::string& lost = membership_.changes().source_lost(); !lost.empty()) {
    fail(ErrorCode::kFenced, "this standby has lost the box: {}", lost);
  }
}

// What it has of a source that is lost stays: its ranks are told apart by that.
void MemberDesk::take_members(Seat& seat, RackNews news) const {
  check_source_is_there();
  if (news.number > seat.rack.number) seat.rack = std::move(news);
}

void MemberDesk::leave(uint32_t rank, Reply<Done> reply) {
  membership_.changes().leave(requests_.expect_done(std::move(reply)), rank);
  driver_.carry_out();
}

void MemberDesk::barrier(uint32_t rank, Reply<Done> reply) {
  if (rack_) reply = rack_->above(std::move(reply));
  membership_.enter_barrier(requests_.expect_done(std::move(reply)), rank);
  driver_.carry_out();
}

void MemberDesk::leave_barrier(const Credential& who) {
  if (driver_.has_ended() || !ranks_.is_current(who.rank, who.incarnation)) return;
  membership_.barrier().leave(who.rank);
  driver_.carry_out();
}

// --- losses --------------------------------------------------------------------------------------

void MemberDesk::control_ended(const Credential& who) {
  if (driver_.has_ended() || who.rank >= seats_.size()) return;
  Seat& seat = seats_[who.rank];
  if (seat.incarnation != who.incarnation || !same_ticket(seat.offer.ticket, who.ticket)) return;
  seat.control_ended = true;
  check_vanished(who.rank);
  driver_.carry_out();
}

void MemberDesk::data_ended(uint32_t rank, uint32_t incarnation) {
  if (!job_.link().can_reconnect()) {
    return lose(rank, incarnation, "its connection closed: the process ended");
  }
  Seat& seat = seats_[rank];
  if (seat.incarnation == incarnation) seat.data_ended = true;
  check_vanished(rank);
}

// A process that lives makes a connection that broke again, and its heartbeats go on meanwhile. A
// process that has closed both connections is gone: waiting for its lease would only hold up the
// other ranks.
void MemberDesk::check_vanished(uint32_t rank) {
  const Seat& seat = seats_[rank];
  if (!seat.data_ended || !seat.control_ended) return;
  lose(rank, seat.incarnation, "all its connections closed: the process ended");
}

void MemberDesk::expel(const std::function<std::string(const Caller& caller)>& why_not) {
  if (driver_.has_ended()) return;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (!ranks_.is_secure(rank, seat.incarnation)) continue;
    if (const std::string why = why_not(seat.caller); !why.empty()) {
      lose(rank, seat.incarnation, why);
    }
  }
  driver_.carry_out();
}

void MemberDesk::lose(uint32_t rank, uint32_t incarnation, const std::string& why) {
  if (!ranks_.is_secure(rank, incarnation)) return;
  host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}': rank {} (incarnation {}) is out: {}",
                                                    job_.spec().name, rank, incarnation, why));
  seats_[rank].noted = true;
  membership_.changes().lose(rank, why);
}

// The log does not know yet of a rank that the membership lost by itself: its lease expired, it
// made no progress, or it was replaced.
void MemberDesk::rank_gone(uint32_t rank) {
  const Seat& seat = seats_[rank];
  const std::string why = ranks_.why_not_current(rank, seat.incarnation);
  if (seat.noted || why.ends_with(": left")) return;
  host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}': {}", job_.spec().name, why));
}

// --- for the driver ------------------------------------------------------------------------------

void MemberDesk::tick(uint64_t now) {
  for (const auto& [rank, incarnation] : answering_) {
    if (ranks_.is_secure(rank, incarnation)) membership_.leases().renew(rank, now);
  }
}

Seat MemberDesk::seat_for(const MembershipAction& admission) const {
  Seat seat{.incarnation = admission.incarnation};
  if (const auto join = joins_.find(admission.token); join != joins_.end()) {
    seat.saves = join->second.saves;
    seat.interest = join->second.interest;
  }
  return seat;
}

void MemberDesk::answer(const MembershipAction& action) {
  if (joins_.contains(action.token)) return answer_join(action);
  if (action.ok) return requests_.answer(action.token, action.first_round);
  requests_.answer(action.token, {action.code, action.message});
}

void MemberDesk::refuse(ErrorCode code, const std::string& why) {
  for (auto& [token, join] : joins_) {
    for (const Reply<JoinReply>& reply : join.replies) reply({code, why});
  }
}

}  // namespace phub
