#include "phub/http_router.h"

#include <array>
#include <charconv>
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

// Without the query: nothing here has one.
std::string_view path_of(std::string_view target) { return target.substr(0, target.find('?')); }

constexpr std::string_view kJobs = "/v1/jobs/";
constexpr std::string_view kLogFrom = "/log/";
constexpr std::string_view kBearer = "Bearer ";
constexpr size_t kMaxTicketBytes = 256;

struct Call {
  std::string job;
  HttpRequest request;
  ControlHandler& handler;
  const HttpCounters& counters;
  Background* background;
  Answer answer;
  Routed routed = {};
  uint64_t from = 0;  // of a log: the record that the page begins with

  // For the handler: its result as the answer.
  template <typename T>
  Reply<T> reply() {
    return [answer = answer](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      answer(encoded(*result.value));
    };
  }
  // The same for what may be long: it is encoded beside the control thread.
  template <typename T>
  Reply<T> long_reply() {
    return [answer = answer, background = background](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      const auto value = std::make_shared<T>(std::move(*result.value));
      run(background, [answer, value]() -> Background::End {
        const auto response = std::make_shared<HttpResponse>(encoded(*value));
        return [answer, response] { answer(std::move(*response)); };
      });
    };
  }
  template <typename T>
  static HttpResponse encoded(const T& value) {
    HttpResponse response;
    const auto failed = error_of([&] { response.body = to_json(value); });
    return failed ? error_response(ErrorCode::kInternal, failed->what()) : response;
  }
  static void run(Background* background, const Background::Task& task) {
    if (background) return background->run(task);
    task()();
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

// Up to 64 MiB, decoded beside the control thread.
void join(Call& call) {
  const auto text = std::make_shared<HttpRequest>(std::move(call.request));
  Call::run(call.background,
            [&handler = call.handler, job = call.job, text, answer = call.answer,
             reply = call.long_reply<JoinReply>()]() -> Background::End {
              const auto request = std::make_shared<JoinRequest>();
              std::optional<Error> refused = error_of([&] {
                *request = parse_join_request(text->body);
                if (request->spec.name != job) {
                  fail(ErrorCode::kInvalid,
                       "join request: spec.name: is '{}', but the path names the job '{}'",
                       request->spec.name, job);
                }
              });
              text->body = {};
              return [&handler, text, request, answer, reply, refused]() mutable {
                text->charge.reset();
                if (!refused) refused = error_of([&] { handler.join(std::move(*request), reply); });
                if (refused) answer(error_response(refused->code(), refused->what()));
              };
            });
}
void heartbeat(Call& call) {
  call.routed.beats = call.who();
  call.handler.heartbeat(*call.routed.beats, call.reply<Pulse>());
}
void leave(Call& call) { call.handler.leave(call.who(), call.reply<Done>()); }
void barrier(Call& call) {
  call.routed.waits = call.who();
  call.handler.barrier(*call.routed.waits, call.reply<Done>());
}
void reconnect(Call& call) { call.handler.reconnect(call.who(), call.reply<Offer>()); }
void set_hyper(Call& call) {
  auto [who, change] = parse_hyper(call.request.body);
  call.handler.set_hyper(call.complete(who), change, call.reply<HyperReply>());
}
void log(Call& call) { call.handler.log(call.job, call.from, call.long_reply<LogPage>()); }
void remove(Call& call) { call.handler.remove(call.job, call.reply<Done>()); }
void status(Call& call) { call.answer({.body = to_json(call.handler.status())}); }
void metrics(Call& call) {
  call.answer({.body = metrics_text(call.handler.status(), call.counters, process_usage()),
               .content_type = kMetricsType});
}
void jobs(Call& call) { call.answer({.body = jobs_json(call.handler.status())}); }
void job(Call& call) { call.answer({.body = to_json(call.handler.job_status(call.job))}); }
void page(Call& call) {
  const PageFile& file = page_file(path_of(call.request.target));
  call.answer({.body = std::string(file.text), .content_type = file.content_type});
}
void healthz(Call& call) { call.answer({.body = "ok\n", .content_type = "text/plain"}); }

using Handle = void (*)(Call&);
constexpr std::array<std::pair<RouteInfo, Handle>, 17> kRoutes = {{
    {{"POST", "/v1/jobs/{job}/join"}, join},
    {{"POST", "/v1/jobs/{job}/heartbeat"}, heartbeat},
    {{"POST", "/v1/jobs/{job}/leave"}, leave},
    {{"POST", "/v1/jobs/{job}/barrier"}, barrier},
    {{"POST", "/v1/jobs/{job}/hyper"}, set_hyper},
    {{"POST", "/v1/jobs/{job}/reconnect"}, reconnect},
    {{"GET", "/v1/jobs/{job}/log"}, log},
    {{"GET", "/v1/jobs/{job}/log/{from}"}, log},
    {{"DELETE", "/v1/jobs/{job}"}, remove},
    {{"GET", "/v1/jobs/{job}"}, job},
    {{"GET", "/v1/jobs"}, jobs},
    {{"GET", "/v1/status"}, status},
    {{"GET", "/healthz"}, healthz},
    {{"GET", "/metrics"}, metrics},
    {{"GET", "/"}, page},
    {{"GET", "/page.css"}, page},
    {{"GET", "/page.js"}, page},
}};

// The target as a pattern, and what stood where the pattern says {job} and {from}.
struct Target {
  std::string pattern;
  std::string_view job;
  uint64_t from = 0;
};
Target parse_target(std::string_view target) {
  target = path_of(target);
  if (!target.starts_with(kJobs)) return {std::string(target), {}};
  const std::string_view rest = target.substr(kJobs.size());
  const size_t slash = rest.find('/');
  const std::string_view action = slash == rest.npos ? std::string_view() : rest.substr(slash);
  Target parsed{"/v1/jobs/{job}" + std::string(action), rest.substr(0, slash)};
  if (action.starts_with(kLogFrom)) {
    const std::string_view number = action.substr(kLogFrom.size());
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), parsed.from);
    if (error == std::errc() && end == number.data() + number.size()) {
      parsed.pattern = "/v1/jobs/{job}/log/{from}";
    }
  }
  return parsed;
}

// Says in `path` which pattern the request fits.
void dispatch(Call& call, std::string_view& path) {
  const Target target = parse_target(call.request.target);
  // A HEAD is a GET whose answer's body stays here (http_session.cc).
  std::string_view method = call.request.method;
  if (method == "HEAD") method = "GET";
  std::string allowed;
  for (const auto& [info, handle] : kRoutes) {
    if (info.pattern != target.pattern) continue;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", info.method);
    if (info.method == "GET") allowed += ", HEAD";
    path = info.pattern;
    if (info.method != method) continue;
    if (call.request.target.starts_with(kJobs)) {
      check_job_name(target.job);  // what cannot be a job never gets near the handler
      call.job = target.job;
      call.from = target.from;
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
  response.allow = std::move(allowed);
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

Routed route(HttpRequest request, ControlHandler& handler, const HttpCounters& counters,
             Background* background, Answer reply) {
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
  Call call{{}, std::move(request), handler, counters, background, once, {}};
  try {
    dispatch(call, state->path);
  } catch (const Error& error) {
    if (!state->answered) once(error_response(error.code(), error.what()));
  } catch (const std::exception& error) {
    if (!state->answered) once(error_response(ErrorCode::kInternal, error.what()));
  }
  return std::move(call.routed);
}

}  // namespace phub
