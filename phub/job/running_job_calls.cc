// A running job: its members' calls, and their answers.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/running_job.h"
#include "transport/greeting.h"

namespace phub {

void RunningJob::check_life(uint64_t epoch) const {
  const std::string& name = job_->spec().name;
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

void RunningJob::check_same_life(uint64_t epoch) const {
  check_life(epoch);
  if (epoch != 0 && epoch < life_.epoch) {
    fail(
        ErrorCode::kRewound,
        "job '{}' has gone on from its checkpoint: join again; a program that is none of its ranks "
        "looks anew at what the job has",
        job_->spec().name);
  }
}

void RunningJob::authenticate(const Credential& who) {
  check_same_life(who.epoch);
  if (who.rank >= seats_.size()) {
    fail(ErrorCode::kNotFound, "job '{}' has no rank {}", who.job, who.rank);
  }
  Seat& seat = seats_[who.rank];
  if (seat.incarnation == who.incarnation && !same_ticket(seat.offer.ticket, who.ticket)) {
    fail(ErrorCode::kUnauthorized, "this is not the ticket of rank {} of job '{}'", who.rank,
         who.job);
  }
  if (ending_ && !error_.empty()) throw Error(error_code_, error_);
  if (ending_ || !membership_.is_current(who.rank, who.incarnation)) {
    throw Error(ErrorCode::kFenced, membership_.why_not_current(who.rank, who.incarnation));
  }
  seat.control_ended = false;
}

Pulse RunningJob::heartbeat(uint32_t rank) {
  membership_.heartbeat(rank, host_.time.now_ms());
  return {.completed_round = membership_.completed_round(),
          .durable_round = saves_.durable_round(),
          .missing = membership_.missing(),
          .assembling = !membership_.assembled()};
}

void RunningJob::take_news(uint32_t rank, RackNews news) {
  const bool is_rack = !job_->spec().rack_ranks.empty();
  if (!is_rack && news.failure.empty()) {
    fail(ErrorCode::kInvalid, "the ranks of job '{}' are not racks", job_->spec().name);
  }
  if (is_rack) savers_.check_news(rank, news);
  Seat& seat = seats_[rank];
  const std::string failure = std::exchange(news.failure, "");
  if (failure.empty()) {
    savers_.take_news(rank, news);
    seat.rack = std::move(news);
    return saves_.check_parts();
  }
  seat.rack.live.clear();
  lose(rank, seat.incarnation,
       is_rack ? fmt::format("rack '{}': {}", news.name, failure) : failure);
  carry_out();
}

void RunningJob::leave(uint32_t rank, Reply<Done> reply) {
  membership_.leave(requests_.expect_done(std::move(reply)), rank);
  carry_out();
}

void RunningJob::barrier(uint32_t rank, Reply<Done> reply) {
  if (rack_) reply = rack_->above(std::move(reply));
  membership_.barrier(requests_.expect_done(std::move(reply)), rank);
  carry_out();
}

void RunningJob::leave_barrier(const Credential& who) {
  if (ending_ || !membership_.is_current(who.rank, who.incarnation)) return;
  membership_.leave_barrier(who.rank);
  carry_out();
}

LogPage RunningJob::log(uint64_t from) {
  LogPage page = membership_.log().page(from);
  count_growth();
  return page;
}

void RunningJob::remove(Reply<Done> reply) {
  removals_.push_back(std::move(reply));
  membership_.remove();
  carry_out();
}

void RunningJob::expel(const std::function<std::string(const Caller& caller)>& why_not) {
  if (ending_) return;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (!membership_.is_secure(rank, seat.incarnation)) continue;
    if (const std::string why = why_not(seat.caller); !why.empty()) {
      lose(rank, seat.incarnation, why);
    }
  }
  carry_out();
}

// A loss, not a leave: a job whose ranks are lost goes on later.
void RunningJob::join_unanswered(uint32_t rank, uint32_t incarnation) {
  if (ending_) return;
  lose(rank, incarnation, "the answer to its join could not be made: no memory is left");
  carry_out();
}

void RunningJob::connection_ended(const Credential& who) {
  if (ending_ || who.rank >= seats_.size()) return;
  Seat& seat = seats_[who.rank];
  if (seat.incarnation != who.incarnation || !same_ticket(seat.offer.ticket, who.ticket)) return;
  seat.control_ended = true;
  check_vanished(who.rank);
  carry_out();
}

void RunningJob::answer(const MembershipAction& action) {
  if (joins_.contains(action.token)) return answer_join(action);
  if (action.ok) return requests_.answer(action.token, action.first_round);
  requests_.answer(action.token, {action.code, action.message});
}

// --- joins ---------------------------------------------------------------------------------------

void RunningJob::check_same(const JobSpec& spec, const std::string& transport) const {
  const std::string different = difference(spec, job_->spec());
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

void RunningJob::join(const JoinRequest& request, Reply<JoinReply> reply) {
  const std::string& id = request.id;
  for (auto& [token, waiting] : joins_) {
    if (id.empty() || waiting.id != id || waiting.caller.id != request.caller.id) continue;
    waiting.replies.push_back(std::move(reply));
    return;
  }
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (id.empty() || seat.id != id || !membership_.is_secure(rank, seat.incarnation)) continue;
    if (seat.caller.id != request.caller.id) continue;
    return answer_join(rank, {std::move(reply)});
  }
  const uint64_t token = requests_.new_token();
  joins_[token] = {id, request.caller, request.saves, request.interest, {std::move(reply)}};
  if (request.saves && savers_.must_tell_parent()) {
    return rack_->delay_join(token, request.rank, request.replace);
  }
  membership_.join(token, request.rank, request.replace, host_.time.now_ms());
  carry_out();
}

void RunningJob::answer_join(const MembershipAction& action) {
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
  answer_join(action.rank, std::move(waiting.replies));
}

void RunningJob::answer_join(uint32_t rank, std::vector<Reply<JoinReply>> replies) {
  const Seat& seat = seats_[rank];
  const auto whose = answering_.emplace(rank, seat.incarnation);
  const auto answer = std::make_shared<JoinReply>(JoinReply{.rank = rank,
                                                            .incarnation = seat.incarnation,
                                                            .first_round = seat.first_round,
                                                            .send_initial = seat.send_initial,
                                                            .offer = seat.offer,
                                                            .epoch = life_.epoch,
                                                            .parts = parts_.parts_for(rank),
                                                            .interest = seat.interest});
  // Who comes later has ended the generation that the others were in.
  if (rank < job_->switch_offer().workers) {
    answer->through_switch = job_->switch_offer();
    answer->through_switch.later = seat.first_round != life_.durable_round + 1;
  }
  if (seat.saves || has_racks()) answer->save_every = savers_.every();
  const auto compose = [this, answer] {
    answer->layout = routes_of(job_->whole_plan());
    answer->spec = job_->spec();
  };
  run_beside(host_.coder, compose, [=, this](const std::optional<Error>& failed) {
    if (failed) join_unanswered(rank, whose->second);
    size_t left = replies.size();
    for (const Reply<JoinReply>& reply : replies) {
      --left;
      if (failed) {
        reply({failed->code(), failed->what()});
      } else if (ending_ && !error_.empty()) {
        reply({error_code_, error_});
      } else {
        reply(left > 0 ? JoinReply(*answer) : std::move(*answer));
      }
    }
    // Behind the encoding of the replies: from now on it has a lease to keep.
    run_beside(
        host_.coder, [] {},
        [this, whose](const std::optional<Error>&) {
          const auto [member, incarnation] = *whose;
          answering_.erase(whose);
          if (!membership_.is_secure(member, incarnation)) return;
          membership_.heartbeat(member, host_.time.now_ms());
        });
  });
}

}  // namespace phub
