#include "phub/control/routes.h"

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <utility>

#include "phub/control/call.h"
#include "phub/control/metrics.h"
#include "phub/control/openapi.h"
#include "phub/control/page.h"
#include "transport/control/http_client.h"
#include "transport/text.h"

namespace phub {
namespace {

// A call of calls.def.
template <typename Answer>
void ask(Call& call, const CallInfo& info,
         void (ControlHandler::*handle)(const Credential&, Reply<Answer>)) {
  const Credential who = call.sender(info, from_json<Credential>(call.request.body));
  (call.handler.*handle)(who, call.reply<Answer>());
}
template <typename Request, typename Answer>
void ask(Call& call, const CallInfo& info,
         void (ControlHandler::*handle)(const Credential&, const Request&, Reply<Answer>)) {
  const auto request = from_json<Request>(call.request.body);
  const Credential who = call.sender(info, request);
  (call.handler.*handle)(who, request, call.reply<Answer>());
}
constexpr RouteInfo info_of(const CallInfo& call, std::string_view request,
                            std::string_view answer) {
  return {.method = "POST",
          .pattern = call.path,
          .need = Need::kNothing,
          .body = request,
          .answer = answer,
          .summary = call.summary,
          .most_bytes = call.most_bytes,
          .admin_too = call.admin_too};
}

// The body may have 64 MiB: it is decoded beside the control thread.
void join(Call& call) {
  const bool may_replace = call.access == nullptr || call.request.caller.may_replace;
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
          return answer(error_response(403, ErrorCode::kUnauthorized,
                                       "replace takes a rank from a process that may be alive: it "
                                       "needs the job's token, or a token of role admin"));
        }
        if (!refused) refused = error_of([&] { handler.join(std::move(*request), reply); });
        if (refused) answer(error_response(refused->code(), refused->what()));
      });
}
// A page of what a job keeps, from number `from` on.
template <typename Page>
void page_of(Call& call,
             void (ControlHandler::*handle)(const std::string&, uint64_t, Reply<Page>)) {
  const uint64_t from = call.numbers.empty() ? 0 : call.numbers.front();
  (call.handler.*handle)(call.job, from, call.long_reply<Page>());
}
void losses(Call& call) { page_of(call, &ControlHandler::losses); }
void log(Call& call) { page_of(call, &ControlHandler::log); }

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
  const Credential who = call.sender_in_path();
  call.handler.take_part(who, piece_in(call.numbers), std::move(call.request.body),
                         std::move(call.request.charge), call.reply<Done>());
}
void restored_part(Call& call) {
  const Credential who = call.sender_in_path();
  call.handler.restored_part(who, whose_in(call.numbers), call.numbers[4], call.bytes_reply());
}
void read_state(Call& call) {
  const Credential who = call.sender_in_path();
  call.handler.read_state(who, call.numbers[3], call.bytes_reply());
}
void want_state(const Credential& who, const std::vector<uint64_t>& numbers, uint64_t bytes,
                ControlHandler& handler) {
  handler.check_state_piece(who, numbers[3], bytes);
}
void write_state(Call& call) {
  const Credential who = call.sender_in_path();
  call.handler.write_state(who, call.numbers[3], std::move(call.request.body),
                           std::move(call.request.charge), call.reply<Done>());
}

void join_shard(Call& call) {
  ShardHello hello = from_json<ShardHello>(call.request.body);
  call.about = fmt::format("shard={}", printable(hello.name));
  call.handler.shards().join(std::move(hello), call.reply<ShardWelcome>());
}
void take_mail(Call& call) {
  auto mail = from_json<ShardMail>(call.request.body);
  call.handler.shards().take_mail(call.numbers.front(), std::move(mail),
                                  call.long_reply<ShardOrders>());
}
// /copies/{part}/{round}/{offset}, behind the shard's number.
CopyPlace of_checkpoint(const std::vector<uint64_t>& numbers) {
  return {.job = numbers[1], .round = numbers[2], .offset = numbers[3]};
}
// The same for /states/{part}/{state}/{offset}.
CopyPlace of_state(const std::vector<uint64_t>& numbers) {
  if (numbers[2] == 0) fail(ErrorCode::kInvalid, "states of keys are counted from 1 on");
  return {.job = numbers[1], .offset = numbers[3], .state = numbers[2]};
}
using PlaceIn = CopyPlace (*)(const std::vector<uint64_t>& numbers);
template <PlaceIn kPlace>
void read_copy(Call& call) {
  const CopyPlace place = kPlace(call.numbers);
  call.handler.shards().read_copy(call.numbers[0], place, call.bytes_reply());
}
template <PlaceIn kPlace>
void want_copy(const Credential& /*who*/, const std::vector<uint64_t>& numbers, uint64_t bytes,
               ControlHandler& handler) {
  const CopyPlace place = kPlace(numbers);
  handler.shards().check_copy(numbers[0], place, bytes);
}
template <PlaceIn kPlace>
void write_copy(Call& call) {
  const CopyPlace place = kPlace(call.numbers);
  call.handler.shards().write_copy(call.numbers[0], place, call.request.body, call.reply<Done>());
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

constexpr Route kRoutes[] = {
#define PHUB_CALL(name, Answer, ...)            \
  {info_of(calls::name, "Credential", #Answer), \
   [](Call& call) { ask(call, calls::name, &ControlHandler::name); }},
#define PHUB_REQUEST(name, Request, Answer, ...) \
  {info_of(calls::name, #Request, #Answer),      \
   [](Call& call) { ask(call, calls::name, &ControlHandler::name); }},
#include "transport/control/calls.def"
    {{"POST", "/v1/jobs/{job}/join", Need::kTrain, "JoinRequest", "JoinReply",
      "Join a job; the first join creates it. The answer comes when the rank is admitted.",
      kMaxJoinBytes},
     join},
    {{"GET", "/v1/jobs/{job}/losses", Need::kSee, "", "LossPage",
      "The losses of the latest rounds, but for the last: of each the mean of the ranks that "
      "reported it, and the branch that ran."},
     losses},
    {{"GET", "/v1/jobs/{job}/losses/{from}", Need::kSee, "", "LossPage",
      "Those from round `from` on."},
     losses},
    {{"POST", "/v1/jobs/{job}/part/{rank}/{incarnation}/{epoch}/{whose}/{round}/{offset}/{bytes}",
      Need::kNothing, kBytesType, "Done",
      "Send a piece of a rank's part of the checkpoint of a round, from byte `offset` on, of so "
      "many in all. The answer comes when it is in its file. `whose` is the rank itself; of a "
      "rack, the rank of the training that sent it there.",
      kPartPieceBytes},
     take_part,
     want_part},
    {{"GET", "/v1/jobs/{job}/part/{rank}/{incarnation}/{epoch}/{whose}/{offset}", Need::kNothing,
      "", kBytesType,
      "A piece of the rank's part of the checkpoint that it goes on from, from byte `offset` on; "
      "of a rack, that of one of its ranks."},
     restored_part},
    {{"GET", "/v1/jobs/{job}/state/{rank}/{incarnation}/{epoch}/{offset}", Need::kNothing, "",
      kBytesType, "Read a piece of the state, from byte `offset` on."},
     read_state},
    {{"POST", "/v1/jobs/{job}/state/{rank}/{incarnation}/{epoch}/{offset}", Need::kNothing,
      kBytesType, "Done", "Send a piece of the state, from byte `offset` on.", kStatePieceBytes},
     write_state,
     want_state},
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
    {{"GET", "/v1/shards/{shard}/copies/{part}/{round}/{offset}", Need::kOwn, "", kBytesType,
      "Read a piece of what a shard has of the checkpoint that a job goes on from."},
     read_copy<of_checkpoint>},
    {{"POST", "/v1/shards/{shard}/copies/{part}/{round}/{offset}", Need::kOwn, kBytesType, "Done",
      "Send a piece of what a shard has of the snapshot that is being taken.", kCopyPieceBytes},
     write_copy<of_checkpoint>,
     want_copy<of_checkpoint>},
    {{"GET", "/v1/shards/{shard}/states/{part}/{state}/{offset}", Need::kOwn, "", kBytesType,
      "Read a piece of what is set of the state of a shard's keys."},
     read_copy<of_state>},
    {{"POST", "/v1/shards/{shard}/states/{part}/{state}/{offset}", Need::kOwn, kBytesType, "Done",
      "Send a piece of the state of a shard's keys that a rank reads.", kCopyPieceBytes},
     write_copy<of_state>,
     want_copy<of_state>},
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

}  // namespace

std::span<const Route> routes() { return kRoutes; }

}  // namespace phub
