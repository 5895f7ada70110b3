// Server: the control port's calls.
#include <fmt/format.h>

#include <utility>

#include "phub/server.h"
#include "transport/error.h"
#include "transport/ticket.h"

namespace phub {
namespace {

// An answer of another type, made from the round of a request's boundary.
template <typename T, typename Make>
Reply<uint64_t> answer_with(Reply<T> reply, Make make) {
  return [reply = std::move(reply), make](Result<uint64_t> result) {
    if (!result) return reply({result.code, result.message});
    reply(make(*result.value));
  };
}

}  // namespace

// The job if the credential is that of a live incarnation; otherwise the answer is given.
template <typename T>
Server::Running* Server::authenticate(const Credential& who, const Reply<T>& reply) {
  Running* running = find(who.job);
  if (!running) {
    answer_ended(who, reply);
    return nullptr;
  }
  Membership& membership = running->job->membership();
  if (who.rank >= running->seats.size()) {
    reply({ErrorCode::kNotFound, fmt::format("job '{}' has no rank {}", who.job, who.rank)});
  } else if (running->seats[who.rank].incarnation == who.incarnation &&
             !same_ticket(running->seats[who.rank].offer.ticket, who.ticket)) {
    reply({ErrorCode::kUnauthorized,
           fmt::format("this is not the ticket of rank {} of job '{}'", who.rank, who.job)});
  } else if (running->ending && !running->error.empty()) {
    reply({running->error_code, running->error});
  } else if (running->ending || !membership.is_current(who.rank, who.incarnation)) {
    reply({ErrorCode::kFenced, membership.why_not_current(who.rank, who.incarnation)});
  } else {
    running->seats[who.rank].control_ended = false;
    return running;
  }
  return nullptr;
}

template <typename T>
void Server::answer_ended(const Credential& who, const Reply<T>& reply) {
  for (auto ended = ended_.rbegin(); ended != ended_.rend(); ++ended) {
    if (ended->name != who.job || who.rank >= ended->seats.size() || ended->error.empty()) continue;
    const Seat& seat = ended->seats[who.rank];
    if (seat.incarnation == who.incarnation && same_ticket(seat.offer.ticket, who.ticket)) {
      return reply({ended->error_code, ended->error});
    }
  }
  reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", who.job)});
}

void Server::heartbeat(const Credential& who, Reply<Pulse> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  Membership& membership = running->job->membership();
  membership.heartbeat(who.rank, time_.now_ms());
  reply(Pulse{.completed_round = membership.completed_round(),
              .missing = membership.missing(),
              .assembling = !membership.assembled()});
}

void Server::leave(const Credential& who, Reply<Done> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  const uint64_t token = next_token_++;
  running->requests[token] = answer_with<Done>(std::move(reply), [](uint64_t) { return Done{}; });
  running->job->membership().leave(token, who.rank);
  carry_out(*running);
}

void Server::barrier(const Credential& who, Reply<Done> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  const uint64_t token = next_token_++;
  running->requests[token] = answer_with<Done>(std::move(reply), [](uint64_t) { return Done{}; });
  running->job->membership().barrier(token, who.rank);
  carry_out(*running);
}

void Server::leave_barrier(const Credential& who) {
  Running* running = find(who.job);
  if (!running || running->ending) return;
  Membership& membership = running->job->membership();
  if (!membership.is_current(who.rank, who.incarnation)) return;
  membership.leave_barrier(who.rank);
  carry_out(*running);
}

void Server::set_hyper(const Credential& who, const HyperChange& change, Reply<HyperReply> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  if (who.rank != 0) {
    return reply({ErrorCode::kUnauthorized,
                  fmt::format("hyperparameters are set by rank 0, not by rank {}", who.rank)});
  }
  check_hyper(change.values);
  if (change.values.contains("rmsprop_momentum")) {
    fail(ErrorCode::kInvalid, "rmsprop_momentum cannot change: it decides how much state there is");
  }
  if (change.values.empty()) fail(ErrorCode::kInvalid, "there are no values to set");
  if (running->job->hyper().full(running->job->membership().completed_round() + 1)) {
    fail(ErrorCode::kFull,
         "{} changes of hyperparameters are still needed: some key is in round {}, or changes were "
         "made far ahead; push every key in every round",
         HyperTable::kMostChanges, running->job->membership().completed_round() + 1);
  }
  const uint64_t token = next_token_++;
  running->requests[token] =
      answer_with<HyperReply>(std::move(reply), [](uint64_t round) { return HyperReply{round}; });
  running->job->membership().set_hyper(token, change);
  carry_out(*running);
}

void Server::reconnect(const Credential& who, Reply<Offer> reply) {
  Running* running = authenticate(who, reply);
  if (!running) return;
  Job& job = *running->job;
  if (!job.link().can_reconnect()) {
    return reply(
        {ErrorCode::kFenced, "this job's transport cannot make a broken connection again"});
  }
  if (!job.membership().is_secure(who.rank, who.incarnation) ||
      running->reconnections.contains(who.rank)) {
    return reply({ErrorCode::kTaken,
                  fmt::format("rank {} is being reconnected or fenced: try again", who.rank)});
  }
  running->reconnections[who.rank] = {.incarnation = who.incarnation, .reply = std::move(reply)};
  broadcast(*running, {.type = CoreMessage::kDetach, .rank = who.rank});
}

void Server::log(const std::string& job, uint64_t from, Reply<LogPage> reply) {
  if (Running* running = find(job)) {
    reply(running->job->membership().log().page(from));
    return count_growth(*running);
  }
  for (auto ended = ended_.rbegin(); ended != ended_.rend(); ++ended) {
    if (ended->name != job) continue;
    if (ended->log) return reply(ended->log->page(from));
    return reply({ErrorCode::kNotFound,
                  fmt::format("the log of job '{}', which has ended, made room for others", job)});
  }
  reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", job)});
}

void Server::remove(const std::string& job, Reply<Done> reply) {
  Running* running = find(job);
  if (!running) return reply({ErrorCode::kNotFound, fmt::format("there is no job '{}'", job)});
  running->removals.push_back(std::move(reply));
  running->job->membership().remove();
  carry_out(*running);
}

std::string Server::describe() const {
  std::string text = fmt::format("{} cores", cores());
  for (const auto& nic : nics_) text.append("\n").append(nic->describe());
  return text;
}

}  // namespace phub
