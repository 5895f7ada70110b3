#include "transport/control/messages_json.h"

#include <array>
#include <nlohmann/json.hpp>

#include "transport/control/message_fields.h"
#include "transport/control/shard_fields.h"

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

template <class Message>
constexpr std::string_view kWhat = "";
#define PHUB_MESSAGE(Message, what) \
  template <>                       \
  constexpr std::string_view kWhat<Message> = what;
#include "transport/control/messages.def"
#undef PHUB_MESSAGE

// What a table of fields does not say.
template <class Message>
void check(const Message& /*message*/) {}
void check(const JobSpec& spec) { validate(spec); }
void check(const JoinRequest& request) {
  if (request.rank < -1 || request.rank >= static_cast<int32_t>(kMaxRanks)) {
    fail(ErrorCode::kInvalid,
         "join request: rank: must be a rank, or -1 for the lowest free one, got {}", request.rank);
  }
  validate(request.spec);
}
void check(const JoinReply& reply) { validate(reply.spec); }
void check(const ShardHello& hello) {
  for (const ShardCore& core : hello.cores) {
    if (core.node >= hello.nodes.size()) {
      fail(ErrorCode::kInvalid, "shard: CPU {} is on node {} of {}", core.cpu, core.node,
           hello.nodes.size());
    }
  }
  for (const ShardNic& nic : hello.nics) {
    if (nic.node >= hello.nodes.size()) {
      fail(ErrorCode::kInvalid, "shard: a NIC is on node {} of {}", nic.node, hello.nodes.size());
    }
  }
}

}  // namespace

template <class Message>
std::string to_json(const Message& message) {
  return json::encode(message);
}
template <class Message>
Message from_json(std::string_view text) {
  auto message = json::decode<Message>(text, kWhat<Message>);
  check(message);
  return message;
}
#define PHUB_MESSAGE(Message, what)             \
  template std::string to_json(const Message&); \
  template Message from_json(std::string_view);
#include "transport/control/messages.def"
#undef PHUB_MESSAGE

std::string jobs_json(const ServerStatus& status) {
  return "{\"jobs\":" + json::encode(status.jobs) + "}";
}

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
  const auto body = from_json<Problem>(text);
  return {body.code, body.detail};
}

}  // namespace phub
