#include "transport/messages_json.h"

#include <nlohmann/json.hpp>

#include "transport/message_fields.h"

namespace phub {

namespace {

// Messages that are wrapped for the wire.
struct HyperBody {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t round = 0;
  HyperValues values;
};
struct ErrorBody {
  ErrorCode error = ErrorCode::kInternal;
  std::string message;
};

template <class A>
void fields(A& a, const HyperBody*) {
  a.required("rank", &HyperBody::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &HyperBody::incarnation);
  a.optional("round", &HyperBody::round);
  a.required("values", &HyperBody::values, {1, kMaxHyperValues});
}
template <class A>
void fields(A& a, const ErrorBody*) {
  a.required("error", &ErrorBody::error);
  a.required("message", &ErrorBody::message, {0, 1u << 16});
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

std::string hyper_json(const Credential& who, const HyperChange& change) {
  return json::encode(HyperBody{who.rank, who.incarnation, change.round, change.values});
}
std::pair<Credential, HyperChange> parse_hyper(std::string_view text) {
  auto body = json::decode<HyperBody>(text, "hyper request");
  Credential who;
  who.rank = body.rank;
  who.incarnation = body.incarnation;
  return {who, {.round = body.round, .values = std::move(body.values)}};
}
std::string to_json(const HyperReply& reply) { return json::encode(reply); }
HyperReply parse_hyper_reply(std::string_view text) {
  return json::decode<HyperReply>(text, "answer to hyper");
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
  return json::decode<ServerStatus>(text, "status");
}

std::string to_json(const JobStatus& status) { return json::encode(status); }
JobStatus parse_job_status(std::string_view text) { return json::decode<JobStatus>(text, "job"); }
std::string jobs_json(const ServerStatus& status) {
  return "{\"jobs\":" + json::encode(status.jobs) + "}";
}

std::string to_json(const Done&) { return "{}"; }

std::string error_json(ErrorCode code, std::string_view message) {
  nlohmann::ordered_json body = {{"error", name_of(code)}, {"message", message}};
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
Error parse_error(std::string_view text) {
  auto body = json::decode<ErrorBody>(text, "error answer");
  return {body.error, body.message};
}

}  // namespace phub
