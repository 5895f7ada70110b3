#include "phub/control/call.h"

namespace phub {
namespace {

constexpr std::string_view kBearer = "Bearer ";
constexpr size_t kMaxTicketBytes = 256;

std::string ticket_in(std::string_view authorization) {
  if (!authorization.starts_with(kBearer) || authorization.size() == kBearer.size() ||
      authorization.size() > kBearer.size() + kMaxTicketBytes) {
    fail(ErrorCode::kUnauthorized,
         "the header 'Authorization: Bearer TICKET' is missing or malformed; the answer to join "
         "has the ticket");
  }
  return std::string(authorization.substr(kBearer.size()));
}

}  // namespace

Credential sender_in_path(const std::string& job, const std::vector<uint64_t>& numbers,
                          std::string_view authorization) {
  if (numbers[0] >= kMaxRanks || numbers[1] > ~uint32_t{0}) {
    fail(ErrorCode::kInvalid, "the path names rank {}, incarnation {}: there is none such",
         numbers[0], numbers[1]);
  }
  return {.job = job,
          .rank = static_cast<uint32_t>(numbers[0]),
          .incarnation = static_cast<uint32_t>(numbers[1]),
          .ticket = ticket_in(authorization),
          .epoch = numbers[2]};
}

Credential Call::sender_in_path() {
  Credential who = phub::sender_in_path(job, numbers, request.authorization);
  about = member(who.rank, who.incarnation);
  return who;
}

Credential Call::sender(const CallInfo& info, Credential who) {
  if (info.admin_too) {
    if (is_admin(who)) return {.job = job, .epoch = who.epoch, .is_admin = true};
    if (who.incarnation == 0) {
      fail(ErrorCode::kUnauthorized,
           "incarnation 0 is no rank's: this is not the ticket of a rank, and no token of role "
           "admin that covers the job");
    }
  }
  who.job = job;
  who.ticket = ticket_in(request.authorization);
  about = member(who.rank, who.incarnation);
  if (info.is_beat) routed.beats = who;
  if (info.is_barrier) routed.waits = who;
  return who;
}

// Of the job, without being one of its ranks. A box that asks for no tokens takes everybody for one
// who names no incarnation and shows no ticket: nothing, or a token.
bool Call::is_admin(const Credential& who) const {
  Caller caller;
  if (access == nullptr) {
    const std::string_view shown = request.authorization;
    return who.incarnation == 0 && (shown.empty() || shown.starts_with("Bearer phub-"));
  }
  return !access->check(Need::kOwn, job, request.authorization, handler, caller) && caller.is_admin;
}

void Call::forget(ControlHandler& handler, const JoinReply& joined) {
  const Credential who{.job = joined.spec.name,
                       .rank = joined.rank,
                       .incarnation = joined.incarnation,
                       .ticket = joined.offer.ticket,
                       .epoch = joined.epoch};
  static_cast<void>(error_of([&] { handler.join_unanswered(who); }));
}

ServerStatus Call::visible_status() const {
  ServerStatus status = handler.status();
  if (access == nullptr) return status;
  std::erase_if(status.jobs,
                [this](const JobStatus& job) { return !access->sees(request.caller, job.name); });
  return status;
}

}  // namespace phub
