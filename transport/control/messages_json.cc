#include "transport/control/messages_json.h"

#include <array>
#include <nlohmann/json.hpp>

#include "transport/control/message_fields.h"

namespace phub {
namespace {

std::string_view title_of(unsigned status) {
  constexpr std::array<std::pair<unsigned, std::string_view>, 15> kTitles = {{
      {400, "Bad Request"},
      {401, "Unauthorized"},
      {403, "Forbidden"},
      {404, "Not Found"},
      {405, "Method Not Allowed"},
      {409, "Conflict"},
      {410, "Gone"},
      {411, "Length Required"},
      {413, "Content Too Large"},
      {415, "Unsupported Media Type"},
      {421, "Misdirected Request"},
      {431, "Request Header Fields Too Large"},
      {503, "Service Unavailable"},
      {504, "Gateway Timeout"},
      {507, "Insufficient Storage"},
  }};
  for (const auto& [number, title] : kTitles) {
    if (number == status) return title;
  }
  return "Internal Server Error";
}

}  // namespace

std::string to_json(const JobSpec& spec) { return json::encode(spec); }
JobSpec parse_job_spec(std::string_view text) {
  auto spec = json::decode<JobSpec>(text, "job");
  validate(spec);
  return spec;
}

std::string to_json(const JoinRequest& request) { return json::encode(request); }
JoinRequest parse_join_request(std::string_view text) {
  auto request = json::decode<JoinRequest>(text, "join request");
  if (request.rank < -1 || request.rank >= static_cast<int32_t>(kMaxRanks)) {
    fail(ErrorCode::kInvalid,
         "join request: rank: must be a rank, or -1 for the lowest free one, got {}", request.rank);
  }
  validate(request.spec);
  return request;
}

std::string to_json(const JoinReply& reply) { return json::encode(reply); }
JoinReply parse_join_reply(std::string_view text) {
  auto reply = json::decode<JoinReply>(text, "answer to join");
  validate(reply.spec);
  return reply;
}

std::string to_json(const Offer& offer) { return json::encode(offer); }
Offer parse_offer(std::string_view text) { return json::decode<Offer>(text, "offer"); }

std::string to_json(const Credential& who) { return json::encode(who); }
Credential parse_credential(std::string_view text) {
  return json::decode<Credential>(text, "request");
}

std::string to_json(const RackNews& news) { return json::encode(news); }
RackNews parse_rack_news(std::string_view text) {
  return json::decode<RackNews>(text, "news of a rack");
}

std::string hyper_json(const Credential& who, const HyperChange& change) {
  return json::encode(
      HyperRequest{who.rank, who.incarnation, change.round, change.values, who.epoch});
}
std::pair<Credential, HyperChange> parse_hyper(std::string_view text) {
  auto body = json::decode<HyperRequest>(text, "hyper request");
  Credential who;
  who.rank = body.rank;
  who.incarnation = body.incarnation;
  who.epoch = body.epoch;
  return {who, {.round = body.round, .values = std::move(body.values)}};
}
std::string to_json(const HyperReply& reply) { return json::encode(reply); }
HyperReply parse_hyper_reply(std::string_view text) {
  return json::decode<HyperReply>(text, "answer to hyper");
}

std::string branch_json(const Credential& who, const BranchChange& change) {
  return json::encode(BranchRequest{who.rank, who.incarnation, who.epoch, change.action,
                                    change.round, change.branch, change.values, change.turns});
}
std::pair<Credential, BranchChange> parse_branch_request(std::string_view text) {
  auto body = json::decode<BranchRequest>(text, "branch request");
  Credential who;
  who.rank = body.rank;
  who.incarnation = body.incarnation;
  who.epoch = body.epoch;
  return {who,
          {.action = body.action,
           .round = body.round,
           .branch = body.branch,
           .values = std::move(body.values),
           .turns = std::move(body.turns)}};
}
std::string to_json(const BranchReply& reply) { return json::encode(reply); }
BranchReply parse_branch_reply(std::string_view text) {
  return json::decode<BranchReply>(text, "answer to branches");
}

std::string to_json(const LossRequest& request) { return json::encode(request); }
LossRequest parse_loss_request(std::string_view text) {
  return json::decode<LossRequest>(text, "loss");
}
std::string to_json(const LossPage& page) { return json::encode(page); }
LossPage parse_loss_page(std::string_view text) { return json::decode<LossPage>(text, "losses"); }

std::string to_json(const StateRequest& request) { return json::encode(request); }
StateRequest parse_state_request(std::string_view text) {
  return json::decode<StateRequest>(text, "state request");
}
std::string to_json(const StateReply& reply) { return json::encode(reply); }
StateReply parse_state_reply(std::string_view text) {
  return json::decode<StateReply>(text, "answer to state");
}
std::string to_json(const CheckpointRequest& request) { return json::encode(request); }
CheckpointRequest parse_checkpoint_request(std::string_view text) {
  return json::decode<CheckpointRequest>(text, "checkpoint request");
}
std::string to_json(const CheckpointReply& reply) { return json::encode(reply); }
CheckpointReply parse_checkpoint_reply(std::string_view text) {
  return json::decode<CheckpointReply>(text, "answer to checkpoint");
}

std::string to_json(const Pulse& pulse) { return json::encode(pulse); }
Pulse parse_pulse(std::string_view text) {
  return json::decode<Pulse>(text, "answer to heartbeat");
}

std::string to_json(const LogPage& page) { return json::encode(page); }
LogPage parse_log_page(std::string_view text) { return json::decode<LogPage>(text, "log"); }
std::string to_json(const LogRecord& record) { return json::encode(record); }

std::string to_json(const ServerStatus& status) { return json::encode(status); }
ServerStatus parse_status(std::string_view text) {
  return json::decode<ServerStatus>(text, "answer to status");
}

std::string to_json(const JobStatus& status) { return json::encode(status); }
JobStatus parse_job_status(std::string_view text) { return json::decode<JobStatus>(text, "job"); }
std::string jobs_json(const ServerStatus& status) {
  return "{\"jobs\":" + json::encode(status.jobs) + "}";
}

std::string to_json(const Done&) { return "{}"; }

unsigned http_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return 400;
    case ErrorCode::kUnauthorized:
      return 401;
    case ErrorCode::kNotFound:
      return 404;
    case ErrorCode::kMismatch:
    case ErrorCode::kTaken:
    case ErrorCode::kRankLost:
    case ErrorCode::kNonFinite:
      return 409;
    case ErrorCode::kFenced:
    case ErrorCode::kRewound:
      return 410;
    case ErrorCode::kUnavailable:
      return 503;
    case ErrorCode::kTimeout:
      return 504;
    case ErrorCode::kFull:
      return 507;
    case ErrorCode::kInternal:
      break;
  }
  return 500;
}

std::string error_json(unsigned status, ErrorCode code, std::string_view message) {
  const nlohmann::ordered_json body = {{"type", kProblemType},
                                       {"title", title_of(status)},
                                       {"status", status},
                                       {"detail", message},
                                       {"code", name_of(code)}};
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
std::string error_json(ErrorCode code, std::string_view message) {
  return error_json(http_status(code), code, message);
}
Error parse_error(std::string_view text) {
  auto body = json::decode<Problem>(text, "error answer");
  return {body.code, body.detail};
}

}  // namespace phub
