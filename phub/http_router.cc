#include "phub/http_router.h"

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "phub/metrics.h"
#include "phub/page.h"
#include "transport/messages_json.h"
#include "transport/text.h"

namespace phub {
namespace {

using Answer = std::function<void(HttpResponse)>;

constexpr std::string_view kJobs = "/v1/jobs/";
constexpr std::string_view kBearer = "Bearer ";
constexpr size_t kMaxTicketBytes = 256;

struct Call {
  std::string job;
  HttpRequest request;
  ControlHandler& handler;
  const HttpCounters& counters;
  Answer answer;

  // For the handler: its result as the answer.
  template <typename T>
  Reply<T> reply() {
    return [answer = answer](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      try {
        answer({.body = to_json(*result.value)});
      } catch (const Error& error) {
        answer(error_response(ErrorCode::kInternal, error.what()));
      }
    };
  }

  // Adds what is not in the body.
  Credential complete(Credential who) const {
    const std::string_view header = request.authorization;
    if (!header.starts_with(kBearer) || header.size() == kBearer.size() ||
        header.size() > kBearer.size() + kMaxTicketBytes) {
      fail(
          ErrorCode::kUnauthorized,
          "the header 'Authorization: Bearer TICKET' is missing or has another form; the ticket is "
          "in the answer to join");
    }
    who.job = job;
    who.ticket = header.substr(kBearer.size());
    return who;
  }
  Credential who() const { return complete(parse_credential(request.body)); }
};

void join(Call& call) {
  JoinRequest request = parse_join_request(call.request.body);
  call.request.body = {};  // up to 64 MiB, decoded
  if (request.spec.name != call.job) {
    fail(ErrorCode::kInvalid, "join request: spec.name: is '{}', but the path names the job '{}'",
         request.spec.name, call.job);
  }
  call.handler.join(std::move(request), call.reply<JoinReply>());
}
void heartbeat(Call& call) { call.handler.heartbeat(call.who(), call.reply<Pulse>()); }
void leave(Call& call) { call.handler.leave(call.who(), call.reply<Done>()); }
void barrier(Call& call) { call.handler.barrier(call.who(), call.reply<Done>()); }
void reconnect(Call& call) { call.handler.reconnect(call.who(), call.reply<Offer>()); }
void set_hyper(Call& call) {
  auto [who, values] = parse_hyper(call.request.body);
  call.handler.set_hyper(call.complete(who), values, call.reply<Done>());
}
void log(Call& call) { call.handler.log(call.job, call.reply<std::vector<LogRecord>>()); }
void remove(Call& call) { call.handler.remove(call.job, call.reply<Done>()); }
void status(Call& call) { call.answer({.body = to_json(call.handler.status())}); }
void metrics(Call& call) {
  call.answer({.body = metrics_text(call.handler.status(), call.counters, process_usage()),
               .content_type = kMetricsType});
}
void page(Call& call) {
  const PageFile& file = page_file(call.request.target);
  call.answer({.body = std::string(file.text), .content_type = file.content_type});
}
void healthz(Call& call) { call.answer({.body = "ok\n", .content_type = "text/plain"}); }

using Handle = void (*)(Call&);
constexpr std::array<std::pair<RouteInfo, Handle>, 14> kRoutes = {{
    {{"POST", "/v1/jobs/{job}/join"}, join},
    {{"POST", "/v1/jobs/{job}/heartbeat"}, heartbeat},
    {{"POST", "/v1/jobs/{job}/leave"}, leave},
    {{"POST", "/v1/jobs/{job}/barrier"}, barrier},
    {{"POST", "/v1/jobs/{job}/hyper"}, set_hyper},
    {{"POST", "/v1/jobs/{job}/reconnect"}, reconnect},
    {{"GET", "/v1/jobs/{job}/log"}, log},
    {{"DELETE", "/v1/jobs/{job}"}, remove},
    {{"GET", "/v1/status"}, status},
    {{"GET", "/healthz"}, healthz},
    {{"GET", "/metrics"}, metrics},
    {{"GET", "/"}, page},
    {{"GET", "/page.css"}, page},
    {{"GET", "/page.js"}, page},
}};

// The target as a pattern, and the job that stood where the pattern says {job}.
struct Target {
  std::string pattern;
  std::string_view job;
};
Target parse_target(std::string_view target) {
  if (!target.starts_with(kJobs)) return {std::string(target), {}};
  const std::string_view rest = target.substr(kJobs.size());
  const size_t slash = rest.find('/');
  const std::string_view action = slash == rest.npos ? std::string_view() : rest.substr(slash);
  return {"/v1/jobs/{job}" + std::string(action), rest.substr(0, slash)};
}

// Says in `path` which pattern the request fits.
void dispatch(Call& call, std::string_view& path) {
  const Target target = parse_target(call.request.target);
  std::string_view allowed;
  for (const auto& [info, handle] : kRoutes) {
    if (info.pattern != target.pattern) continue;
    allowed = info.method;
    path = info.pattern;
    if (info.method != call.request.method) continue;
    if (call.request.target.starts_with(kJobs)) {
      check_job_name(target.job);  // what cannot be a job never gets near the handler
      call.job = target.job;
    }
    return handle(call);
  }
  if (allowed.empty()) {
    return call.answer(
        error_response(ErrorCode::kNotFound,
                       fmt::format("there is nothing at '{}'; the paths are in transport/README.md",
                                   printable(call.request.target))));
  }
  HttpResponse response =
      error_response(405, ErrorCode::kInvalid,
                     fmt::format("{} is not possible on {}; use {}", printable(call.request.method),
                                 target.pattern, allowed));
  response.allow = allowed;
  call.answer(std::move(response));
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

}  // namespace

std::span<const RouteInfo> http_routes() {
  static const auto routes = [] {
    std::array<RouteInfo, kRoutes.size()> infos;
    for (size_t i = 0; i < infos.size(); ++i) infos[i] = kRoutes[i].first;
    return infos;
  }();
  return routes;
}

uint64_t body_limit(std::string_view method, std::string_view target) {
  const bool is_join = method == "POST" && parse_target(target).pattern == "/v1/jobs/{job}/join";
  return is_join ? kMaxJoinBytes : kMaxBodyBytes;
}

HttpResponse error_response(unsigned status, ErrorCode code, std::string_view message) {
  return {.status = status, .body = error_json(code, message)};
}
HttpResponse error_response(ErrorCode code, std::string_view message) {
  return error_response(http_status(code), code, message);
}

void route(HttpRequest request, ControlHandler& handler, const HttpCounters& counters,
           Answer reply) {
  struct State {
    bool answered = false;
    std::string_view path;
  };
  // A handler that answers and then throws has answered.
  const auto state = std::make_shared<State>();
  const Answer once = [state, reply = std::move(reply)](HttpResponse response) {
    PHUB_CHECK(!state->answered);
    state->answered = true;
    response.path = state->path;
    reply(std::move(response));
  };
  Call call{{}, std::move(request), handler, counters, once};
  try {
    dispatch(call, state->path);
  } catch (const Error& error) {
    if (!state->answered) once(error_response(error.code(), error.what()));
  } catch (const std::exception& error) {
    if (!state->answered) once(error_response(ErrorCode::kInternal, error.what()));
  }
}

}  // namespace phub
