#include "phub/control/router.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "phub/control/call.h"
#include "phub/control/routes.h"
#include "transport/text.h"

namespace phub {
namespace {

// A path as the pattern of its route reads it.
struct Target {
  std::string_view job;
  std::vector<uint64_t> numbers;  // of the other names in braces, in their order
};

// The first segment, which is cut off.
std::string_view next_segment(std::string_view& path) {
  path.remove_prefix(1);  // the slash
  const std::string_view segment = path.substr(0, path.find('/'));
  path.remove_prefix(segment.size());
  return segment;
}

std::optional<uint64_t> number_in(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<Target> match(std::string_view pattern, std::string_view path) {
  Target target;
  while (!pattern.empty() && path.starts_with('/')) {
    const std::string_view name = next_segment(pattern), value = next_segment(path);
    if (name == "{job}") {
      target.job = value;
    } else if (name.starts_with('{')) {
      const std::optional<uint64_t> number = number_in(value);
      if (!number) return std::nullopt;
      target.numbers.push_back(*number);
    } else if (name != value) {
      return std::nullopt;
    }
  }
  if (!pattern.empty() || !path.empty()) return std::nullopt;
  return target;
}

// Null: there is nothing at this path, for this method.
const Route* find_route(std::string_view method, std::string_view path, Target& target) {
  if (method == "HEAD") method = "GET";  // session.cc omits the body of its answer
  for (const Route& route : routes()) {
    if (route.info.method != method) continue;
    if (auto matched = match(route.info.pattern, path)) {
      target = std::move(*matched);
      return &route;
    }
  }
  return nullptr;
}

// Sets `pattern` to that of the routes with this path, which are of other methods.
void refuse(const Call& call, std::string_view path, std::string_view& pattern) {
  std::string allowed;
  for (const Route& route : routes()) {
    if (!match(route.info.pattern, path)) continue;
    pattern = route.info.pattern;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", route.info.method);
    if (route.info.method == "GET") allowed += ", HEAD";
  }
  if (allowed.empty()) {
    return call.answer(error_response(
        ErrorCode::kNotFound,
        fmt::format("there is nothing at '{}'; the paths are in transport/control/README.md",
                    printable(call.request.target))));
  }
  HttpResponse response =
      error_response(405, ErrorCode::kInvalid,
                     fmt::format("{} is not allowed on {}; use {}", printable(call.request.method),
                                 pattern, allowed));
  response.allow = std::move(allowed);
  call.answer(std::move(response));
}

// Sets `pattern` to that of the route.
void dispatch(Call& call, std::string_view& pattern) {
  const std::string_view path = path_of(call.request.target);
  Target target;
  const Route* const route = find_route(call.request.method, path, target);
  if (route == nullptr) return refuse(call, path, pattern);
  pattern = route->info.pattern;
  if (target.job.data() != nullptr) {
    check_job_name(target.job);  // the handler gets valid names only
    call.job = target.job;
  }
  call.numbers = std::move(target.numbers);
  route->handle(call);
}

}  // namespace

std::span<const RouteInfo> http_routes() {
  static const auto all = [] {
    std::vector<RouteInfo> infos;
    std::ranges::transform(routes(), std::back_inserter(infos), &Route::info);
    return infos;
  }();
  return all;
}

uint64_t body_limit(std::string_view method, std::string_view target) {
  Target unused;
  const Route* const route = find_route(method, path_of(target), unused);
  return route == nullptr ? kMaxBodyBytes : route->info.most_bytes;
}

bool takes_bytes(std::string_view method, std::string_view target) {
  Target unused;
  const Route* const route = find_route(method, path_of(target), unused);
  return route != nullptr && route->want != nullptr;
}

std::optional<HeadRefusal> refuse_bytes(std::string_view method, std::string_view target,
                                        std::string_view authorization, uint64_t bytes,
                                        ControlHandler& handler) {
  Target parsed;
  const Route* const route = find_route(method, path_of(target), parsed);
  if (route == nullptr || route->want == nullptr) return std::nullopt;
  const std::optional<Error> refused = error_of([&] {
    Credential who;
    if (parsed.job.data() != nullptr) {
      check_job_name(parsed.job);
      who = sender_in_path(std::string(parsed.job), parsed.numbers, authorization);
    }
    route->want(who, parsed.numbers, bytes, handler);
  });
  if (!refused) return std::nullopt;
  return HeadRefusal{http_status(refused->code()), refused->code(), refused->what()};
}

std::optional<HeadRefusal> authorize(std::string_view method, std::string_view target,
                                     std::string_view authorization, const Access* access,
                                     const ControlHandler& handler, Caller& caller) {
  if (access == nullptr) return std::nullopt;
  Target parsed;
  const Route* const route = find_route(method, path_of(target), parsed);
  if (route == nullptr) return std::nullopt;  // there is nothing to be had
  return access->check(route->info.need, parsed.job, authorization, handler, caller);
}

HttpResponse error_response(unsigned status, ErrorCode code, std::string_view message) {
  return {.status = status,
          .body = error_json(status, code, message),
          .content_type = "application/problem+json",
          .about = fmt::format("detail=\"{}\"", printable(message))};
}
HttpResponse error_response(ErrorCode code, std::string_view message) {
  return error_response(http_status(code), code, message);
}

Routed route(HttpRequest request, ControlHandler& handler, const HttpCounters& counters,
             Background* background, const Access* access, Call::Answer reply) {
  struct State {
    bool answered = false;
    std::string_view path;
  };
  // If a handler replies and then throws, the reply counts.
  const auto state = std::make_shared<State>();
  const Call::Answer once = [state, reply = std::move(reply)](HttpResponse response) {
    PHUB_CHECK(!state->answered);
    state->answered = true;
    response.path = state->path;
    reply(std::move(response));
  };
  Call call{{}, std::move(request), handler, counters, background, access, once, {}};
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
