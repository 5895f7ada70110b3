#include "phub/control/router.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "phub/control/metrics.h"
#include "phub/control/openapi.h"
#include "phub/control/page.h"
#include "transport/control/messages_json.h"
#include "transport/text.h"

namespace phub {
namespace {

using Answer = std::function<void(HttpResponse)>;

// `target` without its query, which no route has.
std::string_view path_of(std::string_view target) { return target.substr(0, target.find('?')); }

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

// A credential in a path: /part/{rank}/{incarnation}/{epoch}.
Credential credential_in(const std::vector<uint64_t>& numbers) {
  if (numbers[0] >= kMaxRanks || numbers[1] > ~uint32_t{0}) {
    fail(ErrorCode::kInvalid, "the path names rank {}, incarnation {}: there is none such",
         numbers[0], numbers[1]);
  }
  Credential who;
  who.rank = static_cast<uint32_t>(numbers[0]);
  who.incarnation = static_cast<uint32_t>(numbers[1]);
  who.epoch = numbers[2];
  return who;
}

struct Call {
  std::string job;
  HttpRequest request;
  ControlHandler& handler;
  const HttpCounters& counters;
  Background* background;
  const Gate* gate;
  Answer answer;
  Routed routed = {};
  std::string about = {};              // for the audit
  std::vector<uint64_t> numbers = {};  // in the path

  // Returns a function for the handler that answers with its result.
  template <typename T>
  Reply<T> reply() {
    return [answer = answer, about = about](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      HttpResponse response = encoded(*result.value);
      response.about = about;
      answer(std::move(response));
    };
  }
  // The same for long results: they are encoded beside the control thread.
  template <typename T>
  Reply<T> long_reply() {
    return [answer = answer, background = background, &handler = handler](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      const auto value = std::make_shared<T>(std::move(*result.value));
      const auto response = std::make_shared<HttpResponse>();
      run(
          background,
          [value, response] {
            response->body = to_json(*value);
            if constexpr (std::is_same_v<T, JoinReply>) {
              response->about = member(value->rank, value->incarnation);
            }
          },
          [answer, value, response, &handler](const std::optional<Error>& failed) {
            if (!failed) return answer(std::move(*response));
            forget(handler, *value);
            answer(error_response(failed->code(), failed->what()));
          });
    };
  }
  Reply<PartBytes> bytes_reply() const {
    return [answer = answer](Result<PartBytes> result) {
      if (!result) return answer(error_response(result.code, result.message));
      answer({.body = std::move(result.value->bytes), .content_type = "application/octet-stream"});
    };
  }
  static void forget(ControlHandler& /*handler*/, const LogPage& /*value*/) {}
  static void forget(ControlHandler& /*handler*/, const LossPage& /*value*/) {}
  static void forget(ControlHandler& /*handler*/, const ShardOrders& /*value*/) {}
  static void forget(ControlHandler& handler, const JoinReply& joined) {
    Credential who;
    who.job = joined.spec.name;
    who.rank = joined.rank;
    who.incarnation = joined.incarnation;
    who.ticket = joined.offer.ticket;
    who.epoch = joined.epoch;
    static_cast<void>(error_of([&] { handler.join_unanswered(who); }));
  }
  static std::string member(uint32_t rank, uint32_t incarnation) {
    return fmt::format("rank={} incarnation={}", rank, incarnation);
  }
  template <typename T>
  static HttpResponse encoded(const T& value) {
    HttpResponse response;
    const auto failed = error_of([&] { response.body = to_json(value); });
    return failed ? error_response(ErrorCode::kInternal, failed->what()) : response;
  }
  static void run(Background* background, const Background::Work& work,
                  const Background::End& end) {
    if (background) return background->run(work, end);
    end(error_of(work));
  }

  // Adds the fields that are not in the body.
  Credential complete(Credential who) {
    who.job = job;
    who.ticket = ticket_in(request.authorization);
    about = member(who.rank, who.incarnation);
    return who;
  }
  // Of the job, without being one of its ranks. A box that asks for no tokens takes everybody for
  // one who names no incarnation and shows no ticket: nothing, or a token.
  bool is_admin(const Credential& who) const {
    Caller caller;
    if (gate == nullptr) {
      const std::string_view shown = request.authorization;
      return who.incarnation == 0 && (shown.empty() || shown.starts_with("Bearer phub-"));
    }
    return !gate->check(Need::kOwn, job, request.authorization, handler, caller) && caller.is_admin;
  }
  ServerStatus visible_status() const {
    ServerStatus status = handler.status();
    if (gate == nullptr) return status;
    std::erase_if(status.jobs,
                  [this](const JobStatus& job) { return !gate->sees(request.caller, job.name); });
    return status;
  }
  Credential who() { return complete(from_json<Credential>(request.body)); }
};

// The body may have 64 MiB: it is decoded beside the control thread.
void join(Call& call) {
  const bool may_replace = call.gate == nullptr || call.request.caller.may_replace;
  const auto text = std::make_shared<HttpRequest>(std::move(call.request));
  const auto request = std::make_shared<JoinRequest>();
  Call::run(
      call.background,
      [&handler = call.handler, job = call.job, text, request] {
        auto held = handler.hold_for_join(text->body);
        *request = from_json<JoinRequest>(text->body);
        request->held = std::move(held);
        if (request->spec.name != job) {
          fail(ErrorCode::kInvalid,
               "join request: spec.name: is '{}', but the path names the job '{}'",
               request->spec.name, job);
        }
        text->body = {};
        request->caller = text->caller;
      },
      [&handler = call.handler, text, request, answer = call.answer, may_replace,
       reply = call.long_reply<JoinReply>()](std::optional<Error> refused) {
        text->body = {};
        text->charge.reset();
        if (!refused && request->replace && !may_replace) {
          return answer(error_response(
              403, ErrorCode::kUnauthorized,
              "replace takes a rank from a process that may be alive: it needs the job's token, or "
              "a token of role admin"));
        }
        if (!refused) refused = error_of([&] { handler.join(std::move(*request), reply); });
        if (refused) answer(error_response(refused->code(), refused->what()));
      });
}
void heartbeat(Call& call) {
  call.routed.beats = call.who();
  call.handler.heartbeat(*call.routed.beats, call.reply<Pulse>());
}
void take_news(Call& call) {
  RackNews news = from_json<RackNews>(call.request.body);
  const Credential who =
      call.complete({.rank = news.rank, .incarnation = news.incarnation, .epoch = news.epoch});
  call.handler.take_news(who, std::move(news), call.reply<Done>());
}
void leave(Call& call) {
  const Credential who = call.who();
  call.handler.leave(who, call.reply<Done>());
}
void barrier(Call& call) {
  call.routed.waits = call.who();
  call.handler.barrier(*call.routed.waits, call.reply<Done>());
}
void reconnect(Call& call) {
  const Credential who = call.who();
  call.handler.reconnect(who, call.reply<Offer>());
}
// Who asks, but for the job and the ticket.
template <typename Request>
Credential rank_in(const Request& request) {
  Credential who;
  who.rank = request.rank;
  who.incarnation = request.incarnation;
  who.epoch = request.epoch;
  return who;
}
// Behind is_admin().
void check_names_rank(const Credential& who) {
  if (who.incarnation > 0) return;
  fail(ErrorCode::kUnauthorized,
       "incarnation 0 is no rank's: this is not the ticket of a rank, and no token of role admin "
       "that covers the job");
}
void set_hyper(Call& call) {
  const auto request = from_json<HyperRequest>(call.request.body);
  const Credential who = rank_in(request);
  const HyperChange change{.round = request.round, .values = request.values};
  if (call.is_admin(who)) {
    return call.handler.set_hyper(Admin{call.job, who.epoch}, change, call.reply<HyperReply>());
  }
  check_names_rank(who);
  const Credential rank = call.complete(who);
  call.handler.set_hyper(rank, change, call.reply<HyperReply>());
}
void change_branches(Call& call) {
  const auto request = from_json<BranchRequest>(call.request.body);
  const Credential who = rank_in(request);
  const BranchChange change{.action = request.action,
                            .round = request.round,
                            .branch = request.branch,
                            .values = request.values,
                            .turns = request.turns};
  if (call.is_admin(who)) {
    return call.handler.change_branches(Admin{call.job, who.epoch}, change,
                                        call.reply<BranchReply>());
  }
  check_names_rank(who);
  const Credential rank = call.complete(who);
  call.handler.change_branches(rank, change, call.reply<BranchReply>());
}
void report_loss(Call& call) {
  const LossRequest report = from_json<LossRequest>(call.request.body);
  call.handler.report_loss(call.complete(rank_in(report)), report, call.reply<Done>());
}
void losses(Call& call) {
  const uint64_t from = call.numbers.empty() ? 0 : call.numbers.front();
  call.handler.losses(call.job, from, call.long_reply<LossPage>());
}
// Behind the credential.
uint32_t whose_in(const std::vector<uint64_t>& numbers) {
  if (numbers[3] >= kMaxRanks) {
    fail(ErrorCode::kInvalid, "the path names the part of rank {}: there is none such", numbers[3]);
  }
  return static_cast<uint32_t>(numbers[3]);
}
PartPiece piece_in(const std::vector<uint64_t>& numbers) {
  return {.whose = whose_in(numbers), .round = numbers[4], .offset = numbers[5], .all = numbers[6]};
}
void want_part(const Credential& who, const std::vector<uint64_t>& numbers, uint64_t bytes,
               ControlHandler& handler) {
  handler.check_part(who, piece_in(numbers), bytes);
}
void take_part(Call& call) {
  const Credential who = call.complete(credential_in(call.numbers));
  call.handler.take_part(who, piece_in(call.numbers), std::move(call.request.body),
                         std::move(call.request.charge), call.reply<Done>());
}
void restored_part(Call& call) {
  const Credential who = call.complete(credential_in(call.numbers));
  call.handler.restored_part(who, whose_in(call.numbers), call.numbers[4], call.bytes_reply());
}
void begin_state(Call& call) {
  const StateRequest request = from_json<StateRequest>(call.request.body);
  call.handler.begin_state(call.complete(rank_in(request)), request, call.reply<StateReply>());
}
void read_state(Call& call) {
  const Credential who = call.complete(credential_in(call.numbers));
  call.handler.read_state(who, call.numbers[3], call.bytes_reply());
}
void want_state(const Credential& who, const std::vector<uint64_t>& numbers, uint64_t bytes,
                ControlHandler& handler) {
  handler.check_state_piece(who, numbers[3], bytes);
}
void write_state(Call& call) {
  const Credential who = call.complete(credential_in(call.numbers));
  call.handler.write_state(who, call.numbers[3], std::move(call.request.body),
                           std::move(call.request.charge), call.reply<Done>());
}
void apply_state(Call& call) {
  const Credential who = call.who();
  call.handler.apply_state(who, call.reply<HyperReply>());
}
void end_state(Call& call) {
  const Credential who = call.who();
  call.handler.end_state(who, call.reply<Done>());
}
void checkpoint(Call& call) {
  const CheckpointRequest request = from_json<CheckpointRequest>(call.request.body);
  call.handler.checkpoint(call.complete(rank_in(request)), request.round,
                          call.reply<CheckpointReply>());
}
void log(Call& call) {
  const uint64_t from = call.numbers.empty() ? 0 : call.numbers.front();
  call.handler.log(call.job, from, call.long_reply<LogPage>());
}
void join_shard(Call& call) {
  ShardHello hello = from_json<ShardHello>(call.request.body);
  call.about = fmt::format("shard={}", printable(hello.name));
  call.handler.join_shard(std::move(hello), call.reply<ShardWelcome>());
}
void take_mail(Call& call) {
  call.handler.take_mail(call.numbers.front(), from_json<ShardMail>(call.request.body),
                         call.long_reply<ShardOrders>());
}
// /copies/{part}/{round}/{offset}, behind the shard's number.
CopyPlace copy_place_in(const std::vector<uint64_t>& numbers) {
  return {.job = numbers[1], .round = numbers[2], .offset = numbers[3]};
}
void read_copy(Call& call) {
  call.handler.read_copy(call.numbers[0], copy_place_in(call.numbers), call.bytes_reply());
}
void want_copy(const Credential& /*who*/, const std::vector<uint64_t>& numbers, uint64_t bytes,
               ControlHandler& handler) {
  handler.check_copy(numbers[0], copy_place_in(numbers), bytes);
}
void write_copy(Call& call) {
  call.handler.write_copy(call.numbers[0], copy_place_in(call.numbers), call.request.body,
                          call.reply<Done>());
}
// The same for /states/{part}/{state}/{offset}.
CopyPlace state_place_in(const std::vector<uint64_t>& numbers) {
  if (numbers[2] == 0) fail(ErrorCode::kInvalid, "states of keys are counted from 1 on");
  return {.job = numbers[1], .offset = numbers[3], .state = numbers[2]};
}
void read_shard_state(Call& call) {
  call.handler.read_copy(call.numbers[0], state_place_in(call.numbers), call.bytes_reply());
}
void want_shard_state(const Credential& /*who*/, const std::vector<uint64_t>& numbers,
                      uint64_t bytes, ControlHandler& handler) {
  handler.check_copy(numbers[0], state_place_in(numbers), bytes);
}
void write_shard_state(Call& call) {
  call.handler.write_copy(call.numbers[0], state_place_in(call.numbers), call.request.body,
                          call.reply<Done>());
}
void remove(Call& call) { call.handler.remove(call.job, call.reply<Done>()); }
void status(Call& call) { call.answer({.body = to_json(call.visible_status())}); }
void metrics(Call& call) {
  call.answer({.body = metrics_text(call.visible_status(), call.counters, process_usage()),
               .content_type = kMetricsType});
}
void jobs(Call& call) { call.answer({.body = jobs_json(call.visible_status())}); }
void job(Call& call) { call.answer({.body = to_json(call.handler.job_status(call.job))}); }
void openapi(Call& call) { call.answer({.body = std::string(openapi_json())}); }
void page(Call& call) {
  const PageFile& file = page_file(path_of(call.request.target));
  call.answer({.body = std::string(file.text), .content_type = file.content_type});
}
void healthz(Call& call) { call.answer({.body = "ok\n", .content_type = "text/plain"}); }
void readyz(Call& call) {
  call.handler.check_ready([answer = call.answer](const Result<Done>& ready) {
    if (!ready) return answer(error_response(ready.code, ready.message));
    answer({.body = "ready\n", .content_type = "text/plain"});
  });
}

using Handle = void (*)(Call&);
// Whether bytes are wanted, before they are read: throws Error. Null: the body is a message.
using Want = void (*)(const Credential& who, const std::vector<uint64_t>& numbers, uint64_t bytes,
                      ControlHandler& handler);
struct Route {
  RouteInfo info;
  Handle handle;
  Want want = nullptr;
};
constexpr Route kRoutes[] = {
    {{"POST", "/v1/jobs/{job}/join", Need::kTrain, "JoinRequest", "JoinReply",
      "Join a job; the first join creates it. The answer comes when the rank is admitted.",
      kMaxJoinBytes},
     join},
    {{"POST", "/v1/jobs/{job}/heartbeat", Need::kNothing, "Credential", "Pulse",
      "Say that a rank is alive."},
     heartbeat},
    {{"POST", "/v1/jobs/{job}/rack", Need::kNothing, "RackNews", "Done",
      "Say which ranks a rank that is a rack has; or, for any rank, why it cannot go on.",
      kMaxNewsBytes},
     take_news},
    {{"POST", "/v1/jobs/{job}/leave", Need::kNothing, "Credential", "Done",
      "Leave the job. The answer comes when the others can do without the rank."},
     leave},
    {{"POST", "/v1/jobs/{job}/barrier", Need::kNothing, "Credential", "Done",
      "Wait until every live rank is here."},
     barrier},
    {{"POST", "/v1/jobs/{job}/hyper", Need::kNothing, "HyperRequest", "HyperReply",
      "Change hyperparameters: a rank, or an admin."},
     set_hyper},
    {{"POST", "/v1/jobs/{job}/branches", Need::kNothing, "BranchRequest", "BranchReply",
      "Fork, schedule, kill, revive, discard or list the branches of a job: a rank, or an admin."},
     change_branches},
    {{"POST", "/v1/jobs/{job}/losses", Need::kNothing, "LossRequest", "Done",
      "Report the loss of a round, before the rank pushes that."},
     report_loss},
    {{"GET", "/v1/jobs/{job}/losses", Need::kSee, "", "LossPage",
      "The losses of the latest rounds, but for the last: of each the mean of the ranks that "
      "reported it, and the branch that ran."},
     losses},
    {{"GET", "/v1/jobs/{job}/losses/{from}", Need::kSee, "", "LossPage",
      "Those from round `from` on."},
     losses},
    {{"POST", "/v1/jobs/{job}/reconnect", Need::kNothing, "Credential", "Offer",
      "Get an offer for another data connection."},
     reconnect},
    {{"POST", "/v1/jobs/{job}/part/{rank}/{incarnation}/{epoch}/{whose}/{round}/{offset}/{bytes}",
      Need::kNothing, "application/octet-stream", "Done",
      "Send a piece of a rank's part of the checkpoint of a round, from byte `offset` on, of so "
      "many in all. The answer comes when it is in its file. `whose` is the rank itself; of a "
      "rack, "
      "the rank of the training that sent it there.",
      kPartPieceBytes},
     take_part,
     want_part},
    {{"GET", "/v1/jobs/{job}/part/{rank}/{incarnation}/{epoch}/{whose}/{offset}", Need::kNothing,
      "", "application/octet-stream",
      "A piece of the rank's part of the checkpoint that it goes on from, from byte `offset` on; "
      "of a rack, that of one of its ranks."},
     restored_part},
    {{"POST", "/v1/jobs/{job}/state", Need::kNothing, "StateRequest", "StateReply",
      "Begin to read or to set the state of keys. The answer comes when its bytes may be read, or "
      "sent.",
      kMaxStateRequestBytes},
     begin_state},
    {{"GET", "/v1/jobs/{job}/state/{rank}/{incarnation}/{epoch}/{offset}", Need::kNothing, "",
      "application/octet-stream", "Read a piece of the state, from byte `offset` on."},
     read_state},
    {{"POST", "/v1/jobs/{job}/state/{rank}/{incarnation}/{epoch}/{offset}", Need::kNothing,
      "application/octet-stream", "Done", "Send a piece of the state, from byte `offset` on.",
      kStatePieceBytes},
     write_state,
     want_state},
    {{"POST", "/v1/jobs/{job}/state/apply", Need::kNothing, "Credential", "HyperReply",
      "Set the state that was sent. The answer is the round from which it holds."},
     apply_state},
    {{"POST", "/v1/jobs/{job}/state/end", Need::kNothing, "Credential", "Done",
      "Drop what was read or sent of a state."},
     end_state},
    {{"POST", "/v1/jobs/{job}/checkpoint", Need::kNothing, "CheckpointRequest", "CheckpointReply",
      "Ask for a checkpoint as soon as possible, or how one is doing that was asked for."},
     checkpoint},
    {{"GET", "/v1/jobs/{job}/log", Need::kSee, "", "LogPage",
      "The first page of the log of memberships and hyperparameters."},
     log},
    {{"GET", "/v1/jobs/{job}/log/{from}", Need::kSee, "", "LogPage",
      "The page of the log that begins with record `from`."},
     log},
    {{"DELETE", "/v1/jobs/{job}", Need::kOwn, "", "Done", "End a job and everything it has."},
     remove},
    {{"GET", "/v1/jobs/{job}", Need::kSee, "", "JobStatus", "How a job is doing."}, job},
    {{"GET", "/v1/jobs", Need::kObserve, "", "JobList", "How all jobs are doing."}, jobs},
    {{"GET", "/v1/status", Need::kObserve, "", "ServerStatus", "How the box is doing."}, status},
    {{"POST", "/v1/shards", Need::kOwn, "ShardHello", "ShardWelcome",
      "Serve under this server: with a part of the chunks of its jobs.", kMaxShardBytes},
     join_shard},
    {{"POST", "/v1/shards/{shard}/mail", Need::kOwn, "ShardMail", "ShardOrders",
      "What a shard reports; or, when it waits, the server's orders to it.", kMaxJoinBytes},
     take_mail},
    {{"GET", "/v1/shards/{shard}/copies/{part}/{round}/{offset}", Need::kOwn, "",
      "application/octet-stream",
      "Read a piece of what a shard has of the checkpoint that a job goes on from."},
     read_copy},
    {{"POST", "/v1/shards/{shard}/copies/{part}/{round}/{offset}", Need::kOwn,
      "application/octet-stream", "Done",
      "Send a piece of what a shard has of the snapshot that is being taken.", kCopyPieceBytes},
     write_copy,
     want_copy},
    {{"GET", "/v1/shards/{shard}/states/{part}/{state}/{offset}", Need::kOwn, "",
      "application/octet-stream", "Read a piece of what is set of the state of a shard's keys."},
     read_shard_state},
    {{"POST", "/v1/shards/{shard}/states/{part}/{state}/{offset}", Need::kOwn,
      "application/octet-stream", "Done",
      "Send a piece of the state of a shard's keys that a rank reads.", kCopyPieceBytes},
     write_shard_state,
     want_shard_state},
    {{"GET", "/v1/openapi.json", Need::kNothing, "", "application/json", "This document."},
     openapi},
    {{"GET", "/healthz", Need::kNothing, "", "text/plain", "Whether the server answers."}, healthz},
    {{"GET", "/readyz", Need::kNothing, "", "text/plain",
      "Whether the server takes jobs; of a box under a server: whether it has joined that."},
     readyz},
    {{"GET", "/metrics", Need::kObserve, "", "text/plain", "For Prometheus."}, metrics},
    {{"GET", "/", Need::kNothing, "", "text/html", "A page for people."}, page},
    {{"GET", "/page.css", Need::kNothing, "", "text/css", "Its looks."}, page},
    {{"GET", "/page.js", Need::kNothing, "", "text/javascript", "Its script."}, page},
};

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
  for (const Route& route : kRoutes) {
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
  for (const Route& route : kRoutes) {
    if (!match(route.info.pattern, path)) continue;
    pattern = route.info.pattern;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", route.info.method);
    if (route.info.method == "GET") allowed += ", HEAD";
  }
  if (allowed.empty()) {
    return call.answer(
        error_response(ErrorCode::kNotFound,
                       fmt::format("there is nothing at '{}'; the paths are in transport/README.md",
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
  static const auto routes = [] {
    std::array<RouteInfo, std::size(kRoutes)> infos;
    std::ranges::transform(kRoutes, infos.begin(), &Route::info);
    return infos;
  }();
  return routes;
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
      who = credential_in(parsed.numbers);
      who.job = parsed.job;
      who.ticket = ticket_in(authorization);
    }
    route->want(who, parsed.numbers, bytes, handler);
  });
  if (!refused) return std::nullopt;
  return HeadRefusal{http_status(refused->code()), refused->code(), refused->what()};
}

std::optional<HeadRefusal> authorize(std::string_view method, std::string_view target,
                                     std::string_view authorization, const Gate* gate,
                                     const ControlHandler& handler, Caller& caller) {
  if (gate == nullptr) return std::nullopt;
  Target parsed;
  const Route* const route = find_route(method, path_of(target), parsed);
  if (route == nullptr) return std::nullopt;  // there is nothing to be had
  return gate->check(route->info.need, parsed.job, authorization, handler, caller);
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
             Background* background, const Gate* gate, Answer reply) {
  struct State {
    bool answered = false;
    std::string_view path;
  };
  // If a handler replies and then throws, the reply counts.
  const auto state = std::make_shared<State>();
  const Answer once = [state, reply = std::move(reply)](HttpResponse response) {
    PHUB_CHECK(!state->answered);
    state->answered = true;
    response.path = state->path;
    reply(std::move(response));
  };
  Call call{{}, std::move(request), handler, counters, background, gate, once, {}};
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
