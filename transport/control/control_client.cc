#include "transport/control/control_client.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>

#include "transport/control/job_spec.h"
#include "transport/control/messages_json.h"
#include "transport/text.h"

namespace phub {
namespace {

// An answer that is no error of ours comes from something else that listens there.
std::string checked(HttpAnswer answer) {
  if (answer.status == 200) return std::move(answer.body);
  std::optional<Error> error;
  try {
    error = parse_error(answer.body);
  } catch (const Error&) {
    fail(ErrorCode::kUnavailable, "the answer is HTTP status {} with '{}': is this a phub server?",
         answer.status, printable(answer.body));
  }
  throw Error(error->code(), escaped(error->what()));  // it may name what others chose
}

// The body of these calls is the part.
std::string part_path(const Credential& who, uint32_t whose) {
  return fmt::format("/part/{}/{}/{}/{}", who.rank, who.incarnation, who.epoch, whose);
}

std::string piece_path(const Credential& who, uint64_t offset) {
  return fmt::format("/state/{}/{}/{}/{}", who.rank, who.incarnation, who.epoch, offset);
}

std::string copy_target(uint64_t shard, const CopyPlace& place) {
  const bool of_state = place.state > 0;
  return fmt::format("/v1/shards/{}/{}/{}/{}/{}", shard, of_state ? "states" : "copies", place.job,
                     of_state ? place.state : place.round, place.offset);
}

// Such a request does nothing, so it may also be sent twice.
template <typename Request>
bool only_asks(const Request& /*request*/) {
  return false;
}
bool only_asks(const BranchRequest& request) { return request.action == BranchAction::kList; }

}  // namespace

template <typename Answer, typename Request>
Answer ControlClient::ask(const CallInfo& call, const Credential& who, const Request& request,
                          uint32_t timeout_ms) {
  check_job_name(who.job);
  if (!call.may_repeat && !only_asks(request)) http_.disconnect();
  const std::string target = fmt::format(fmt::runtime(call.path), fmt::arg("job", who.job));
  const std::string answer =
      checked(http_.request("POST", target, who.ticket, to_json(request), timeout_ms));
  if constexpr (std::is_same_v<Answer, Done>) {
    return {};
  } else {
    return from_json<Answer>(answer);
  }
}

#define PHUB_CALL(name, Answer, ...)                                       \
  Answer ControlClient::name(const Credential& who, uint32_t timeout_ms) { \
    return ask<Answer>(calls::name, who, who, timeout_ms);                 \
  }
#define PHUB_REQUEST(name, Request, Answer, ...)                                            \
  Answer ControlClient::name(const Credential& who, Request request, uint32_t timeout_ms) { \
    return ask<Answer>(calls::name, who, sent_by(who, std::move(request)), timeout_ms);     \
  }
#include "transport/control/calls.def"

std::string ControlClient::call(std::string_view method, const std::string& job,
                                std::string_view action, std::string_view bearer,
                                std::string_view body, uint32_t timeout_ms,
                                std::string_view content_type) {
  check_job_name(job);
  const std::string target = fmt::format("/v1/jobs/{}{}", job, action);
  return checked(http_.request(method, target, bearer, body, timeout_ms, content_type));
}

JoinReply ControlClient::join(const JoinRequest& request, uint32_t timeout_ms) {
  // Without an id, a join that is sent twice would take two ranks.
  if (request.id.empty()) http_.disconnect();
  return from_json<JoinReply>(
      call("POST", request.spec.name, "/join", token_, to_json(request), timeout_ms));
}

LossPage ControlClient::losses(const std::string& job, uint64_t from, uint32_t timeout_ms) {
  return from_json<LossPage>(
      call("GET", job, fmt::format("/losses/{}", from), token_, "", timeout_ms));
}

void ControlClient::send_part(const Credential& who, const PartPiece& place, std::string_view piece,
                              uint32_t timeout_ms) {
  call(
      "POST", who.job,
      fmt::format("{}/{}/{}/{}", part_path(who, place.whose), place.round, place.offset, place.all),
      who.ticket, piece, timeout_ms, kBytesType);
}

std::string ControlClient::restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                                         uint32_t timeout_ms) {
  return call("GET", who.job, fmt::format("{}/{}", part_path(who, whose), offset), who.ticket, "",
              timeout_ms);
}

std::string ControlClient::read_state(const Credential& who, uint64_t offset, uint32_t timeout_ms) {
  return call("GET", who.job, piece_path(who, offset), who.ticket, "", timeout_ms);
}

void ControlClient::write_state(const Credential& who, uint64_t offset, std::string_view piece,
                                uint32_t timeout_ms) {
  call("POST", who.job, piece_path(who, offset), who.ticket, piece, timeout_ms, kBytesType);
}

std::vector<LogRecord> ControlClient::log(const std::string& job, uint32_t timeout_ms) {
  std::vector<LogRecord> all;
  uint64_t asked = 0;
  for (LogPage page{.more = true}; page.more;) {
    page = log_page(job, asked, timeout_ms);
    if (page.first != asked) {
      fail(ErrorCode::kFull,
           "the server has dropped the first {} records of the log of job '{}', which grew too "
           "long: read it page by page while the job runs",
           page.first, job);
    }
    asked += page.records.size();
    for (LogRecord& record : page.records) {
      const std::vector<ChunkRange>& ranges = record.last_rounds;
      if (all.empty() || ranges.empty() || ranges.front().first == 0) {
        all.push_back(std::move(record));
      } else {  // the part of the one before that did not fit into it
        std::ranges::copy(ranges, std::back_inserter(all.back().last_rounds));
      }
    }
  }
  return all;
}

LogPage ControlClient::log_page(const std::string& job, uint64_t from, uint32_t timeout_ms) {
  return from_json<LogPage>(call("GET", job, fmt::format("/log/{}", from), token_, "", timeout_ms));
}

void ControlClient::remove(const std::string& job, uint32_t timeout_ms) {
  call("DELETE", job, "", token_, "", timeout_ms);
}

void ControlClient::ping(uint32_t timeout_ms) {
  http_.request("GET", "/healthz", {}, {}, timeout_ms);
}
ServerStatus ControlClient::status(uint32_t timeout_ms) {
  return from_json<ServerStatus>(
      checked(http_.request("GET", "/v1/status", token_, "", timeout_ms)));
}

ShardWelcome ControlClient::join_shard(const ShardHello& hello, uint32_t timeout_ms) {
  return from_json<ShardWelcome>(
      checked(http_.request("POST", "/v1/shards", token_, to_json(hello), timeout_ms)));
}

ShardOrders ControlClient::mail(uint64_t shard, const ShardMail& mail, uint32_t timeout_ms) {
  const std::string target = fmt::format("/v1/shards/{}/mail", shard);
  return from_json<ShardOrders>(
      checked(http_.request("POST", target, token_, to_json(mail), timeout_ms)));
}

std::string ControlClient::read_copy(uint64_t shard, const CopyPlace& place, uint32_t timeout_ms) {
  return checked(http_.request("GET", copy_target(shard, place), token_, "", timeout_ms));
}

void ControlClient::write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                               uint32_t timeout_ms) {
  checked(http_.request("POST", copy_target(shard, place), token_, piece, timeout_ms, kBytesType));
}

JobStatus ControlClient::job_status(const std::string& job, uint32_t timeout_ms) {
  return from_json<JobStatus>(call("GET", job, "", token_, "", timeout_ms));
}

}  // namespace phub
