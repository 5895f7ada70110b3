// The control port over real sockets: every route, every limit, and clients that misbehave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <boost/asio/completion_condition.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>
#include <fstream>
#include <future>
#include <limits>

#include "phub/control/router.h"
#include "tests/phub/http_rig.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub {
namespace http_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const Credential kWho{"mnist", 3, 7, "0123456789abcdef0123456789abcdef"};

JobSpec small_spec(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{"w", 64}, {"b", 64}};
  return spec;
}

std::string post(std::string_view target, std::string_view body, std::string_view headers = "") {
  return fmt::format(
      "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
      "{}\r\n{}\r\n{}",
      target, body.size(), headers, body);
}
constexpr std::string_view kBarrierBody = R"({"rank":0,"incarnation":1})";
const std::string kBarrier =
    post("/v1/jobs/j/barrier", kBarrierBody, "Authorization: Bearer t\r\n");
const std::string kHealth = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";

ErrorCode code_of(const std::function<void()>& act, std::string_view expected = "") {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(expected));
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::kInternal;
}

TEST(Http, EveryCallArrivesAndIsAnswered) {
  HttpRig rig;
  ControlClient client(rig.address());
  JoinRequest request;
  request.spec = small_spec("mnist");
  request.rank = 3;
  const JoinReply joined = client.join(request, 5000);
  EXPECT_EQ(joined.rank, 3u);
  EXPECT_EQ(joined.incarnation, 7u);
  EXPECT_EQ(joined.first_round, 12u);
  EXPECT_EQ(joined.offer.ticket, kWho.ticket);
  EXPECT_THAT(joined.layout.queue_chunks, ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  EXPECT_EQ(joined.spec, request.spec);
  EXPECT_THAT(client.heartbeat(kWho).missing, ElementsAre(2));
  EXPECT_EQ(client.set_hyper(kWho, {.round = 6, .values = {{"lr", 0.5}}}).round, 7u);
  EXPECT_EQ(client.change_branches(kWho, {.round = 4, .branch = 2, .turns = {{1, 0}}}).branch, 7u);
  client.report_loss(kWho, loss_of(12, 0.25));
  client.report_loss(kWho, loss_of(13, std::numeric_limits<double>::infinity(), "train"));
  EXPECT_THAT(client.losses("mnist", 4).losses,
              ElementsAre(RoundLoss{.round = 5, .branch = 3, .ranks = 2}));
  client.remark(kWho, {.remark = {.subject = "rate", .text = "0.1"}});
  EXPECT_EQ(client.reconnect(kWho).address, "10.0.0.1:99");
  EXPECT_EQ(client.log("mnist").at(0).reason, "lease");
  EXPECT_EQ(client.status().topology, "fake");
  EXPECT_EQ(client.job_status("mnist").state, "running");
  client.send_part(kWho, {.whose = 5, .round = 40, .offset = 0, .all = 12},
                   std::string("\x01 any\0", 6));
  client.send_part(kWho, {.whose = 5, .round = 40, .offset = 6, .all = 12}, " bytes");
  EXPECT_EQ(client.restored_part(kWho, 6, 1), std::string(" any\0 bytes", 11));
  client.leave(kWho);
  client.remove("mnist");
  for (const char* name : {"", "mnist?", "mnist/log", "mn ist"}) {  // not another request
    EXPECT_EQ(code_of([&] { client.remove(name); }), ErrorCode::kInvalid) << name;
  }
  EXPECT_THAT(rig.on_control([&] { return rig.handler.calls; }),
              ElementsAre("join mnist 3", "heartbeat mnist/3/7/0123456789abcdef0123456789abcdef",
                          "hyper(lr=0.5@6) mnist/3/7/0123456789abcdef0123456789abcdef",
                          "list branch 2 at 4, 1 turns mnist/3/7/0123456789abcdef0123456789abcdef",
                          "loss 0.25 of 12 loss mnist/3/7/0123456789abcdef0123456789abcdef",
                          "loss nan of 13 train mnist/3/7/0123456789abcdef0123456789abcdef",
                          "losses mnist 4",
                          "remark on rate: 0.1 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "reconnect mnist/3/7/0123456789abcdef0123456789abcdef", "log mnist 0",
                          "log mnist 1", "log mnist 2", "status mnist",
                          "check_part of 5 0+6/12 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "take_part of 5 0+6/12 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "check_part of 5 6+6/12 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "take_part of 5 6+6/12 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "restored_part of 6 1 mnist/3/7/0123456789abcdef0123456789abcdef",
                          "leave mnist/3/7/0123456789abcdef0123456789abcdef", "remove mnist"));
  // All of it over one connection, but for join, which begins one.
  EXPECT_EQ(rig.connections(), 1u);
}

// Before its bytes are read, or sent.
TEST(Http, APartThatIsNotWantedIsRefusedByItsHeader) {
  HttpRig rig;
  const auto answer = [&](const std::string& path, const std::string& headers) {
    RawClient raw(rig.address());
    raw.send("POST /v1/jobs/j/part/" + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers +
             "\r\n");
    return raw.answers(1);
  };
  const std::string ticket = "Authorization: Bearer t\r\n";
  const std::string type = "Content-Type: application/octet-stream\r\n";
  const std::string length = "Content-Length: 1000000\r\n";
  rig.on_control(
      [&] { rig.handler.check = [] { fail(ErrorCode::kNotFound, "nobody wants it"); }; });
  EXPECT_THAT(answer("0/1/1/0/5/0/1000000", ticket + type + length),
              AllOf(StartsWith("HTTP/1.1 404"), HasSubstr("nobody wants it")));
  rig.on_control([&] { rig.handler.check = {}; });
  EXPECT_THAT(answer("0/1/1/0/5/0/1000000", type + length), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(answer("0/1/1/0/5/0/1000000", ticket + "Content-Type: application/json\r\n" + length),
              AllOf(StartsWith("HTTP/1.1 415"), HasSubstr("octet-stream")));
  EXPECT_THAT(answer("0/1/1/0/5/0/1000000", ticket + type + "Content-Length: 16777217\r\n"),
              StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(answer("999999/1/1/0/5/0/9", ticket + type + length), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(answer("0/9999999999/1/0/5/0/9", ticket + type + length), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(answer("0/1/1/1024/5/0/9", ticket + type + length),
              AllOf(StartsWith("HTTP/1.1 400"), HasSubstr("the part of rank 1024")));
  for (const char* path : {"0/1/1/0/5/0/", "0/1/1/0/5/6", "0/1/1/0/5/0/9/1", "0/1/1/0/5/0/x",
                           "0/1/1/0/5/0/-1", "/1/1/0/5/0/9", "0/1/1/0/5/0/99999999999999999999"}) {
    // Nothing is there: it is like any other request, whose body would be JSON.
    EXPECT_THAT(answer(path, ticket + "Content-Type: application/json\r\nContent-Length: 0\r\n"),
                StartsWith("HTTP/1.1 404"))
        << path;
  }
  EXPECT_TRUE(rig.on_control([&] { return rig.handler.parts.empty(); }));
}

TEST(Http, ErrorsKeepTheirCode) {
  HttpRig rig;
  ControlClient client(rig.address());
  const std::vector<std::pair<ErrorCode, std::string>> statuses = {
      {ErrorCode::kInvalid, "400"},     {ErrorCode::kMismatch, "409"},
      {ErrorCode::kTaken, "409"},       {ErrorCode::kFull, "507"},
      {ErrorCode::kNotFound, "404"},    {ErrorCode::kUnauthorized, "401"},
      {ErrorCode::kFenced, "410"},      {ErrorCode::kRankLost, "409"},
      {ErrorCode::kNonFinite, "409"},   {ErrorCode::kTimeout, "504"},
      {ErrorCode::kUnavailable, "503"},
  };
  for (const auto& [code, status] : statuses) {
    rig.on_control([&, code = code] { rig.handler.leave_code = code; });
    EXPECT_EQ(code_of([&] { client.leave(kWho); }, "as the test says"), code);
    RawClient raw(rig.address());
    raw.send(post("/v1/jobs/j/leave", kBarrierBody, "Authorization: Bearer t\r\n"));
    EXPECT_THAT(raw.answers(1), StartsWith("HTTP/1.1 " + status));
  }
  JoinRequest request;
  request.spec = small_spec("throws");
  EXPECT_EQ(code_of([&] { client.join(request, 5000); }, "needs 5 GiB"), ErrorCode::kFull);
  EXPECT_EQ(code_of([&] { client.log("unknown"); }, "no job 'unknown'"), ErrorCode::kNotFound);
}

TEST(Http, HeadIsGetWithoutItsBodyAndQueriesMeanNothing) {
  HttpRig rig;
  for (const char* path : {"/healthz", "/v1/status", "/v1/jobs", "/page.js?v=2", "/metrics?x"}) {
    RawClient get(rig.address()), head(rig.address());
    const std::string rest =
        fmt::format(" {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
    get.send("GET" + rest);
    head.send("HEAD" + rest);
    const std::string whole = get.rest(), begin = head.rest();
    EXPECT_THAT(whole, StartsWith("HTTP/1.1 200")) << path;
    EXPECT_THAT(begin, StartsWith("HTTP/1.1 200")) << path;
    const size_t body = whole.find("\r\n\r\n") + 4;
    EXPECT_LT(body, whole.size()) << path;
    EXPECT_THAT(begin, ::testing::EndsWith("\r\n\r\n")) << path;
    EXPECT_THAT(begin, Not(HasSubstr("Content-Length: 0\r\n"))) << path;
  }
}

TEST(Http, ARefusedMethodIsCountedAtItsPath) {
  HttpRig rig;
  RawClient put(rig.address()), get(rig.address());
  put.send("PUT /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(put.answers(1), HasSubstr("405"));
  get.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(get.rest(),
              HasSubstr(R"(phub_http_requests_total{path="/v1/jobs/{job}/join",code="405"} 1)"));
}

TEST(Http, BadRequestsAreRefusedAndTheHandlerNeverSeesThem) {
  HttpRig rig;
  const std::string bearer = "Authorization: Bearer t\r\n";
  const std::vector<std::tuple<std::string, std::string, std::string>> cases = {
      {"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "there is nothing at '/nothing'"},
      {"GET /v1/jobs/j/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "not_found"},
      {"GET /v1/jobs/j/log/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "not_found"},
      {"GET /v1/jobs/j/part/{rank}/1/0/0/0 HTTP/1.1\r\nHost: localhost\r\n\r\n", "404",
       "not_found"},
      {"GET /v1/nothing?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "not_found"},
      {"GET /v1/jobs/nobody HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "no job 'nobody'"},
      {"PUT /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n", "405", "Allow: GET"},
      {"GET /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\n\r\n", "405", "Allow: POST"},
      {"GET /v1/jobs/{job}/log HTTP/1.1\r\nHost: localhost\r\n\r\n", "400",
       "name: must be 1 to 255 letters"},
      {"GET /v1/jobs/a%2fb/log HTTP/1.1\r\nHost: localhost\r\n\r\n", "400", "name: must be"},
      {"GET /v1/jobs/../log HTTP/1.1\r\nHost: localhost\r\n\r\n", "400", "name: must be"},
      {"DELETE /v1/jobs/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "400", "name: must be"},
      {post("/v1/jobs/j/leave", "{}", bearer), "400", "\\\"rank\\\" is missing"},
      {post("/v1/jobs/j/leave", kBarrierBody), "401", "WWW-Authenticate: Bearer"},
      {post("/v1/jobs/j/leave", kBarrierBody, "Authorization: Basic t\r\n"), "401", "unauthorized"},
      {post("/v1/jobs/j/leave", kBarrierBody, "Authorization: Bearer \r\n"), "401", "unauthorized"},
      {post("/v1/jobs/j/join",
            R"({"version":1,"spec":{"name":"k","keys":[{"name":"w","elements":1}]}})"),
       "400", "the path names the job 'j'"},
      {post("/v1/jobs/j/hyper", R"({"rank":0,"incarnation":1,"values":{"lr":"x"}})", bearer), "400",
       "values.lr: must be a number"},
      {post("/v1/jobs/j/branches", R"({"rank":0,"incarnation":1,"action":"graft"})", bearer), "400",
       "action: must be"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"loss":1})", bearer), "400",
       "\\\"round\\\" is missing"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"round":-1,"loss":1})", bearer),
       "400", "round: must be"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"round":1,"loss":"x"})", bearer),
       "400", "loss: must be a number"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"round":1,"loss":1e999})", bearer),
       "400", "invalid"},
      {post("/v1/jobs/j/losses", R"({"rank":1024,"incarnation":1,"round":1,"loss":1})", bearer),
       "400", "rank: must be"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"round":1,"name":""})", bearer),
       "400", "name: must be a string of 1 to 32"},
      {post("/v1/jobs/j/losses", R"({"rank":0,"incarnation":1,"round":1,"loss":1})"), "401",
       "unauthorized"},
      {"GET /v1/jobs/j/losses/x HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "not_found"},
      {"GET /v1/jobs/j/losses/1/2 HTTP/1.1\r\nHost: localhost\r\n\r\n", "404", "not_found"},
      {"nonsense\r\n\r\n", "400", "this is not HTTP/1.1"},
      {std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), "400", "not HTTP"},
      {"GET / HTTP/9.9\r\n\r\n", "400", "not HTTP"},
      {"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", "400", "not HTTP"},
      {"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
       "400", "not HTTP"},
      {"POST /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
       "application/json\r\nContent-Length: 99999999999\r\n\r\n",
       "413", "67108864"},
      {"POST /v1/jobs/j/leave HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
       "application/json\r\nContent-Length: 16385\r\n\r\n",
       "413", "the body has 16385 bytes; the limit of this request is 16384"},
      {"POST /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
       "application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
       "411", "Content-Length"},
      {"GET /" + std::string(10000, 'a') + " HTTP/1.1\r\nHost: localhost\r\n\r\n", "431",
       "8192 bytes"},
      {"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(100000, 'a') + "\r\n\r\n", "431",
       "8192 bytes"},
  };
  for (const auto& [request, status, expected] : cases) {
    RawClient client(rig.address());
    client.send(request);
    const std::string answer = client.answers(1);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 " + status)) << request.substr(0, 100);
    EXPECT_THAT(answer, HasSubstr(expected)) << request.substr(0, 100);
  }
  EXPECT_THAT(rig.on_control([&] { return rig.handler.calls; }), ElementsAre());
}

// A box that asks for no tokens lets everybody decide, as it lets everybody delete.
TEST(Http, WhoShowsNoTicketIsNoRank) {
  HttpRig rig;
  HttpClient client(rig.address());
  const auto fork = [&](const std::string& bearer, int incarnation) {
    return client.request(
        "POST", "/v1/jobs/j/branches", bearer,
        fmt::format(R"({{"rank":0,"incarnation":{},"epoch":5,"action":"fork","branch":2}})",
                    incarnation),
        5000);
  };
  EXPECT_EQ(fork("", 0).status, 200u);
  EXPECT_EQ(fork("ticket", 4).status, 200u);
  EXPECT_EQ(fork("phub-of-another-box", 0).status, 200u);
  const HttpAnswer refused = fork("ticket", 0);
  EXPECT_EQ(refused.status, 401u);
  EXPECT_THAT(refused.body, HasSubstr("no token of role admin"));
  EXPECT_THAT(rig.on_control([&] { return rig.handler.calls; }),
              ElementsAre("fork branches of j by an admin of life 5",
                          "fork branch 2 at 0, 0 turns j/0/4/ticket",
                          "fork branches of j by an admin of life 5"));
}

TEST(Http, ThePageComesWithAPolicyThatLetsNothingElseIn) {
  HttpRig rig;
  for (const auto& [path, type] : std::vector<std::pair<std::string, std::string>>{
           {"/", "text/html"}, {"/page.css", "text/css"}, {"/page.js", "text/javascript"}}) {
    RawClient client(rig.address());
    client.send("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    const std::string answer = client.answers(1);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(answer, HasSubstr("Content-Type: " + type + "; charset=utf-8\r\n"));
    EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self'; "
                                  "style-src 'self'; connect-src 'self'; "));
    EXPECT_THAT(answer, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
    EXPECT_THAT(answer, Not(HasSubstr("unsafe")));
  }
}

TEST(Http, TheTicketIsNeverRepeated) {
  HttpRig rig;
  rig.on_control([&] { rig.handler.leave_code = ErrorCode::kUnauthorized; });
  RawClient client(rig.address());
  client.send(post("/v1/jobs/j/leave", kBarrierBody, "Authorization: Bearer s3cret\r\n"));
  client.send(post("/v1/jobs/j/leave", "[]", "Authorization: Bearer s3cret\r\n"));
  client.send(post("/v1/jobs/j/nothing", "[]", "Authorization: Bearer s3cret\r\n"));
  EXPECT_THAT(client.answers(3), Not(HasSubstr("s3cret")));
}

TEST(Http, PipelinedRequestsAreAnsweredInOrder) {
  HttpRig rig;
  RawClient client(rig.address());
  client.send(kHealth + kBarrier + kHealth +
              "GET /v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 1; }));
  rig.on_control([&] { rig.handler.release_barrier(); });
  const std::string text = client.rest();
  EXPECT_THAT(text, Not(HasSubstr("still open")));
  const size_t first = text.find("ok\n"), barrier = text.find("{}"), second = text.rfind("ok\n"),
               status = text.find("\"fake\"");
  EXPECT_LT(first, barrier);
  EXPECT_LT(barrier, second);
  EXPECT_LT(second, status);
}

TEST(Http, ABodyMayComeInPiecesAndAfterContinue) {
  HttpRig rig;
  RawClient client(rig.address());
  const std::string body =
      R"({"version":1,"spec":{"name":"j","keys":[{"name":"w","elements":1}]}})";
  const std::string request = post("/v1/jobs/j/join", body, "Expect: 100-continue\r\n");
  const size_t header = request.size() - body.size();
  client.send(request.substr(0, 20));
  client.send(request.substr(20, header - 20));
  EXPECT_THAT(client.answers(1), StartsWith("HTTP/1.1 100"));
  for (const char c : body) client.send(std::string_view(&c, 1));
  EXPECT_THAT(client.answers(1), StartsWith("HTTP/1.1 200"));
}

// A byte now and then does not help. (Half requests: http_attack_test.cc.)
TEST(Http, SlowClientsAreCutOff) {
  HttpRig rig({.request_timeout_ms = 200});
  RawClient slow(rig.address());
  const auto begin = std::chrono::steady_clock::now();
  auto end = std::async([&] { return slow.rest(30000); });
  for (const char c : kHealth.substr(0, 30)) {
    slow.send(std::string_view(&c, 1));
    if (end.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) break;
  }
  EXPECT_EQ(end.get(), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(25000));
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.calls.empty(); }));
}

TEST(Http, IdleConnectionsAreClosedAndTheClientComesBack) {
  HttpRig rig({.idle_timeout_ms = 100});
  ControlClient client(rig.address());
  client.heartbeat(kWho);
  EXPECT_TRUE(rig.has_connections(0));
  client.heartbeat(kWho);
  EXPECT_EQ(rig.on_control([&] { return rig.handler.calls.size(); }), 2u);
}

TEST(Http, AClientThatIsGoneBeforeTheAnswerHarmsNobody) {
  HttpRig rig;
  {
    RawClient client(rig.address());
    client.send(kBarrier);
    EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 1; }));
  }
  // The connection goes although nobody has answered, and the handler is told.
  EXPECT_TRUE(rig.has_connections(0));
  EXPECT_THAT(rig.on_control([&] { return rig.handler.calls; }),
              ElementsAre("barrier j/0/1/t", "leave_barrier j/0/1/t"));
  rig.on_control([&] { rig.handler.release_barrier(); });
  EXPECT_EQ(ControlClient(rig.address()).status().topology, "fake");
}

TEST(Http, AnAnswerAfterTheServerIsDropped) {
  HttpRig rig;
  RawClient client(rig.address());
  client.send(kBarrier);
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 1; }));
  rig.destroy_server();
  EXPECT_EQ(client.rest(), "");
  rig.on_control([&] { rig.handler.release_barrier(); });
}

TEST(Http, TwoHundredWaitAtOnce) {
  HttpRig rig;
  const auto clients = raw_clients(rig.address(), 200, kBarrier);
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 200; }));
  EXPECT_EQ(ControlClient(rig.address()).status().topology, "fake");  // nobody is kept waiting
  rig.on_control([&] { rig.handler.release_barrier(); });
  for (const auto& client : clients) EXPECT_THAT(client->answers(1), StartsWith("HTTP/1.1 200"));
}

// Each listener waits until there are descriptors again, whatever the others do.
TEST(Http, WithoutDescriptorsNobodySpins) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "UBSan opens a pipe to look at an object's type, and takes its failure for a fault";
#endif
  std::vector<std::string> said;
  HttpRig rig({.audit = [&said](const std::string& line) { said.push_back(line); }}, 2);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  std::vector<std::unique_ptr<RawClient>> clients;
  // The clients have theirs; those of the server's ends are missing.
  const auto limit = [&](rlim_t descriptors) {
    const rlimit few{descriptors, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  };
  rig.on_control([&] {  // nothing is accepted meanwhile
    for (const size_t i : {0, 1}) clients.push_back(std::make_unique<RawClient>(rig.address(i)));
    const int lowest = dup(0);
    close(lowest);
    limit(static_cast<rlim_t>(lowest));
  });
  const auto cpu_ms = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto ms = [](const timeval& t) { return t.tv_sec * 1000 + t.tv_usec / 1000; };
    return ms(usage.ru_utime) + ms(usage.ru_stime);
  };
  const auto used = cpu_ms();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_ms() - used, 50);
  EXPECT_EQ(rig.connections(), 0u);
  limit(before.rlim_cur);
  rig.on_control([&] {
    EXPECT_THAT(said, ::testing::Contains(HasSubstr("no further connection: 0 are open, and: Too "
                                                    "many open files; raise LimitNOFILE")));
  });
  for (const auto& client : clients) {
    client->send(kHealth);
    EXPECT_THAT(client->answers(1), StartsWith("HTTP/1.1 200"));
  }
}

// What was announced and never comes takes nothing from anybody.
TEST(Http, LongBodiesShareABudget) {
  HttpRig rig({.max_long_body_bytes = 1 << 20});
  const std::string post =
      "POST /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  const std::string header = post + "Content-Length: 600000\r\n";
  auto first = std::make_unique<RawClient>(rig.address());
  first->send(header + "Expect: 100-continue\r\n\r\n");
  EXPECT_THAT(first->answers(1), StartsWith("HTTP/1.1 100"));
  RawClient second(rig.address()), largest(rig.address());
  second.send(header + "\r\n");
  largest.send(post + "Content-Length: 67108864\r\n\r\n");
  RawClient third(rig.address());
  third.send(header + "\r\n" + std::string(600000, ' '));
  EXPECT_THAT(third.answers(1), StartsWith("HTTP/1.1 400"));

  first->send(std::string(599999, ' '));
  second.send(std::string(599999, ' '));
  // Whichever of the two is the first to exceed what all may hold.
  bool refused = false;
  for (int i = 0; i < 3000 && !refused; ++i) {
    RawClient metrics(rig.address());
    metrics.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    refused = metrics.answers(1).find("code=\"503\"} 1") != std::string::npos;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(refused);
  first.reset();
  second.close();
  largest.close();
  third.close();
  EXPECT_TRUE(rig.has_connections(0));  // all of it is given back
  for (int i = 0; i < 3; ++i) {
    RawClient client(rig.address());
    client.send(header + "\r\n" + std::string(600000, ' '));
    EXPECT_THAT(client.answers(1), StartsWith("HTTP/1.1 400"));
  }
}

// Answers that nobody reads are bounded too.
TEST(Http, LongAnswersShareABudget) {
  HttpRig rig({.max_unread_bytes = 40u << 20});
  const size_t bytes = 16u << 20;  // more than two sockets' buffers
  rig.on_control([&] { rig.handler.topology = std::string(bytes, 'x'); });
  const std::string get = "GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n";
  auto idle = raw_clients(rig.address(), 2, get);
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.status_calls == 2; }));
  RawClient third(rig.address());
  third.send(get);
  EXPECT_THAT(third.answers(1), StartsWith("HTTP/1.1 503"));
  EXPECT_EQ(ControlClient(rig.address()).heartbeat(kWho).completed_round, 41u);
  idle.clear();
  rig.on_control([&] { rig.handler.topology = std::string(200 << 10, 'x'); });
  EXPECT_TRUE(rig.has_connections(1));  // what they held is given back
  RawClient last(rig.address());
  last.send(get);
  EXPECT_THAT(last.answers(1), StartsWith("HTTP/1.1 200"));
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // which take memory of their own
#else
constexpr bool kSanitized = false;
#endif

// 1,000 connections that send nothing, or a header that never ends, cost little, and others are
// served.
TEST(Http, HalfOpenConnectionsAreCheap) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 2200) GTEST_SKIP() << "not enough file descriptors";
  HttpRig rig;
  const auto resident = [] {  // now: the most there ever was may be another test's
    int64_t all = 0, in_memory = 0;
    EXPECT_TRUE(std::ifstream("/proc/self/statm") >> all >> in_memory);
    return in_memory * sysconf(_SC_PAGESIZE) >> 10;  // KiB
  };
  const auto before = resident();
  const std::string endless = "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(4000, 'x');
  const auto silent = raw_clients(rig.address(), 500);
  const auto sending = raw_clients(rig.address(), 500, endless);
  EXPECT_EQ(ControlClient(rig.address()).status().topology, "fake");
  EXPECT_GE(rig.connections(), 1000u);
  if (!kSanitized) {
    EXPECT_LT(resident() - before, 24 * 1024);
  }
}

TEST(Listen, SeveralAddressesAndIpv6) {
  boost::asio::io_context io;
  FakeHandler handler;
  HttpOptions options;
  options.listen = {"127.0.0.1:0", "[::1]:0"};
  HttpServer server(io, handler, options);
  const auto addresses = server.addresses();
  ASSERT_EQ(addresses.size(), 2u);
  EXPECT_THAT(addresses[0], ::testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
  EXPECT_THAT(addresses[1], ::testing::MatchesRegex("\\[::1\\]:[1-9][0-9]*"));
  std::thread thread([&] { io.run(); });
  EXPECT_EQ(ControlClient(addresses[0]).status().topology, "fake");
  EXPECT_EQ(ControlClient(addresses[1]).status().topology, "fake");
  boost::asio::post(io, [&] { server.stop(); });
  thread.join();
}

TEST(Listen, APortInUseIsNamedWithTheWayOut) {
  boost::asio::io_context io;
  FakeHandler handler;
  HttpOptions options;
  options.listen = {"127.0.0.1:0"};
  HttpServer first(io, handler, options);
  options.listen = first.addresses();
  const std::string port = options.listen[0].substr(options.listen[0].find(':') + 1);
  EXPECT_EQ(code_of([&] { HttpServer second(io, handler, options); },
                    "port " + port + " on 127.0.0.1 is in use"),
            ErrorCode::kTaken);
  EXPECT_EQ(code_of([&] { HttpServer second(io, handler, options); }, "--listen 127.0.0.1:0"),
            ErrorCode::kTaken);
  options.listen = {"192.0.2.1:0"};
  EXPECT_EQ(code_of([&] { HttpServer second(io, handler, options); }, "no interface"),
            ErrorCode::kUnavailable);
  options.listen = {"127.0.0.1"};
  EXPECT_EQ(code_of([&] { HttpServer second(io, handler, options); }, "not an address"),
            ErrorCode::kInvalid);
  options.listen = {};
  EXPECT_EQ(code_of([&] { HttpServer second(io, handler, options); }), ErrorCode::kInvalid);
}

TEST(Client, NobodyThere) {
  std::string address;
  {
    HttpRig rig;
    address = rig.address();
  }
  EXPECT_EQ(code_of([&] { ControlClient(address).status(); },
                    "no phub server at " + address + ": Connection refused; start one with"),
            ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([] { ControlClient client("127.0.0.1"); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([] { ControlClient client(":80"); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([] { ControlClient("no-such-host.invalid:80").status(); }, "no phub server at"),
            ErrorCode::kUnavailable);
}

TEST(Client, SendsNoHeadersOfOthers) {
  HttpRig rig;
  ControlClient client(rig.address());
  Credential who = kWho;
  who.ticket = "t\r\nX: y";
  EXPECT_EQ(code_of([&] { client.leave(who); }, "the ticket of a request"), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { client.log("a b"); }, "name: must be 1 to 255"), ErrorCode::kInvalid);
}

TEST(Client, TimesOutAndIsUsableAfterwards) {
  HttpRig rig;
  ControlClient client(rig.address());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(code_of([&] { client.barrier(kWho, 2000); }, "waiting for an answer"),
            ErrorCode::kTimeout);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(client.status().topology, "fake");
}

TEST(Client, SomethingElseListensThere) {
  for (const auto& [answer, expected, code] :
       std::vector<std::tuple<std::string, std::string, ErrorCode>>{
           {"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>", "is this a phub server?",
            ErrorCode::kUnavailable},
           {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "answer to status",
            ErrorCode::kInvalid},
           {"SSH-2.0-OpenSSH_9.2\r\n", "lost: bad version", ErrorCode::kUnavailable},
           {"", "lost: end of stream", ErrorCode::kUnavailable}}) {
    boost::asio::io_context io;
    using boost::asio::ip::tcp;
    tcp::acceptor acceptor(io, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
    std::thread other([&, text = answer] {
      tcp::socket socket = acceptor.accept();
      char request[1024];
      socket.read_some(boost::asio::buffer(request));
      boost::asio::write(socket, boost::asio::buffer(text));
    });
    const auto address = fmt::format("127.0.0.1:{}", acceptor.local_endpoint().port());
    EXPECT_EQ(code_of([&] { ControlClient(address).status(); }, expected), code);
    other.join();
  }
}

// One that was lost on its way may have been answered: sent again, it would be the next one.
TEST(Client, ABarrierIsSentOnce) {
  boost::asio::io_context io;
  using boost::asio::ip::tcp;
  tcp::acceptor acceptor(io, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
  std::atomic<int> barriers = 0;
  std::thread other([&] {
    for (;;) {
      tcp::socket socket = acceptor.accept();
      for (;;) {
        char request[1024];
        boost::system::error_code gone;
        const size_t bytes = socket.read_some(boost::asio::buffer(request), gone);
        const std::string_view text(request, bytes);
        if (text.find("/leave") != text.npos) return;
        if (text.find("/barrier") != text.npos) ++barriers;
        if (gone || text.find("/heartbeat") == text.npos) break;
        boost::asio::write(socket, boost::asio::buffer(std::string_view(
                                       "HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n"
                                       "{\"completed_round\":0}")));
      }
    }
  });
  ControlClient client(fmt::format("127.0.0.1:{}", acceptor.local_endpoint().port()));
  client.heartbeat(kWho);
  EXPECT_EQ(code_of([&] { client.barrier(kWho, 5000); }, "lost"), ErrorCode::kUnavailable);
  EXPECT_EQ(barriers, 1);
  EXPECT_EQ(code_of([&] { client.leave(kWho, 5000); }), ErrorCode::kUnavailable);
  other.join();
}

TEST(Client, APartIsSentWhenTheServerWantsIt) {
  boost::asio::io_context io;
  using boost::asio::ip::tcp;
  tcp::acceptor acceptor(io, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0));
  const std::string part(100'000, 'x');
  std::string not_wanted, wanted;
  const auto read_head = [](tcp::socket& socket, std::string& text) {
    const size_t head =
        boost::asio::read_until(socket, boost::asio::dynamic_buffer(text), "\r\n\r\n");
    EXPECT_THAT(text.substr(0, head), HasSubstr("Expect: 100-continue\r\n"));
    text.erase(0, head);
  };
  const auto answer = [](tcp::socket& socket, const std::string& status, const std::string& body) {
    boost::asio::write(
        socket, boost::asio::buffer(fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\n\r\n{}",
                                                status, body.size(), body)));
  };
  std::thread other([&] {
    tcp::socket first = acceptor.accept();
    read_head(first, not_wanted);
    answer(first, "404 Not Found", error_json(ErrorCode::kNotFound, "nobody wants it"));
    boost::system::error_code gone;  // it closes the connection, which could be kept
    boost::asio::read(first, boost::asio::dynamic_buffer(not_wanted), gone);
    tcp::socket second = acceptor.accept();
    read_head(second, wanted);
    boost::asio::write(second, boost::asio::buffer(std::string("HTTP/1.1 100 Continue\r\n\r\n")));
    boost::asio::read(second, boost::asio::dynamic_buffer(wanted),
                      boost::asio::transfer_exactly(part.size() - wanted.size()), gone);
    answer(second, "200 OK", "{}");
  });
  ControlClient client(fmt::format("127.0.0.1:{}", acceptor.local_endpoint().port()));
  EXPECT_EQ(code_of([&] { client.send_part(kWho, {.round = 40, .all = part.size()}, part); },
                    "nobody wants it"),
            ErrorCode::kNotFound);
  client.send_part(kWho, {.round = 41, .all = part.size()}, part);
  other.join();
  EXPECT_EQ(not_wanted, "");
  EXPECT_EQ(wanted, part);
}

TEST(Client, CancelEndsARequestFromAnotherThread) {
  HttpRig rig;
  ControlClient client(rig.address());
  auto request = std::async([&] { return code_of([&] { client.barrier(kWho, 0); }, "cancelled"); });
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 1; }));
  client.cancel();
  ASSERT_EQ(request.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(request.get(), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { client.status(); }, "cancelled"), ErrorCode::kUnavailable);
}

}  // namespace http_test
}  // namespace phub
