// Who may do what, over real sockets with a real server: every message, in every state of a job,
// with every credential that is not good for it is refused and changes nothing.
#include "phub/control/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "numa/topology.h"
#include "phub/control/port.h"
#include "phub/control/router.h"
#include "phub/notes.h"
#include "phub/server.h"
#include "phub/server_loop.h"
#include "transport/control/control_client.h"
#include "transport/control/http_client.h"
#include "transport/control/messages_json.h"
#include "transport/shm/transport.h"
#include "worker/phub.h"

namespace phub {
namespace access_test {

using ::testing::HasSubstr;

constexpr uint32_t kMs = 20'000;

class GatedBox {
 public:
  explicit GatedBox(const std::string& topology = "pack:1 core:1 pu:1") {
    for (const auto& [name, role, jobs] : std::vector<std::tuple<std::string, Role, std::string>>{
             {"alice", Role::kTrain, "alice-*"},
             {"bob", Role::kTrain, "bob-*"},
             {"bobs-admin", Role::kAdmin, "bob-*"},
             {"late", Role::kAdmin, "*"},
             {"watch", Role::kObserve, "*"},
             {"root", Role::kAdmin, "*"}}) {
      secret[name] = make_token();
      tokens.push_back(
          {.name = name, .role = role, .jobs = {jobs}, .digest = sha256(secret[name])});
      if (name == "late") tokens.back().expires_s = 1000;
    }
    access.emplace(tokens, [this] { return now_s; });
    ServerOptions options;
    options.quota_of = [this](const Caller& creator) { return access->quota_of(creator); };
    options.topology = numa::from_synthetic(topology);
    options.pin = false;
    options.note = [this](const std::string& line) { notes.push_back(line); };
    std::vector<std::unique_ptr<Transport>> nics;
    nics.push_back(make_shm_transport());
    server = std::make_unique<Server>(std::move(options), std::move(nics), clock);
    loop = std::make_unique<ServerLoop>(*server, io);
    HttpOptions http;
    http.listen = {"127.0.0.1:0"};
    http.after_request = [this] { loop->poll_soon(); };
    http.access = &*access;
    http.audit = [this](const std::string& line) { audit.push_back(line); };
    port = std::make_unique<HttpServer>(io, *server, http);
    address = port->addresses().front();
    server->start_threads();
    thread = std::thread([this] { io.run(); });
  }
  ~GatedBox() {
    io.stop();
    thread.join();
    port.reset();
    loop.reset();
    server->stop_threads();
  }

  template <typename F>
  auto on_control(F f) {
    std::packaged_task<decltype(f())()> task(std::move(f));
    auto result = task.get_future();
    boost::asio::post(io, [&task] { task(); });
    return result.get();
  }

  JoinRequest join_request(const std::string& job, const std::string& id, int32_t rank = -1) {
    JoinRequest request;
    request.spec.name = job;
    request.spec.keys = {{.name = "w", .elements = 100}};
    request.spec.world_size = job.ends_with("assembling") ? 2 : 1;
    request.spec.max_ranks = 4;
    request.spec.lease_ms = 600'000;
    request.spec.join_limit_ms = 600'000;
    request.rank = rank;
    request.id = id;
    return request;
  }
  JoinReply join(const std::string& job, const std::string& who, const std::string& id) {
    return ControlClient(address, token(who)).join(join_request(job, id), kMs);
  }
  std::string token(const std::string& who) { return secret.contains(who) ? secret.at(who) : who; }
  static Credential ticket_of(const JoinReply& reply) {
    return {reply.spec.name, reply.rank, reply.incarnation, reply.offer.ticket};
  }

  // Everything that a request could change.
  std::string everything() {
    return on_control([this] {
      std::string all;
      for (const JobStatus& job : server->status().jobs) {
        all += fmt::format("{} {} {} round {}", job.name, job.state, job.memory_bytes,
                           job.completed_round);
        for (const RankStatus& rank : job.ranks) {
          all += fmt::format(" {}/{}:{}", rank.rank, rank.incarnation, rank.state);
        }
        const JobOwner* owner = server->owner(job.name);
        all += owner == nullptr ? " nobody's"
                                : fmt::format(" {} {}", owner->creator.name, owner->token_sha256);
        server->losses(job.name, 0, [&](Result<LossPage> page) { all += to_json(*page.value); });
        server->log(job.name, 0, [&](Result<LogPage> page) { all += to_json(*page.value); });
        all += '\n';
      }
      return all;
    });
  }

  int64_t now_s = 2000;
  std::map<std::string, std::string> secret;
  std::vector<Token> tokens;
  std::optional<Access> access;
  std::vector<std::string> audit, notes;  // control thread
  SteadyClock clock;
  boost::asio::io_context io{1};
  std::unique_ptr<Server> server;
  std::unique_ptr<ServerLoop> loop;
  std::unique_ptr<HttpServer> port;
  std::string address;
  std::thread thread;
};

struct Message {
  std::string name, method, action, body;
  Need need;
  bool ticket = false;
};

// The messages about a job; `rank`/`incarnation` is one of its live ranks, if it has one.
std::vector<Message> messages_about(GatedBox& box, const std::string& job) {
  const std::string rank = R"({"rank":0,"incarnation":1})";
  JoinRequest joins = box.join_request(job, "mine"), replaces = box.join_request(job, "mine", 0);
  replaces.replace = true;
  return {
      {"join", "POST", "/join", to_json(joins), Need::kTrain},
      {"replace", "POST", "/join", to_json(replaces), Need::kOwn},
      {"delete", "DELETE", "", "", Need::kOwn},
      {"status", "GET", "", "", Need::kSee},
      {"log", "GET", "/log", "", Need::kSee},
      {"log page", "GET", "/log/0", "", Need::kSee},
      {"heartbeat", "POST", "/heartbeat", rank, Need::kNothing, true},
      {"leave", "POST", "/leave", rank, Need::kNothing, true},
      {"barrier", "POST", "/barrier", rank, Need::kNothing, true},
      {"hyper", "POST", "/hyper", R"({"rank":0,"incarnation":1,"values":{"grad_scale":9}})",
       Need::kOwn, true},
      {"branches", "POST", "/branches", R"({"rank":0,"incarnation":1,"action":"list"})", Need::kOwn,
       true},
      {"loss", "POST", "/losses", R"({"rank":0,"incarnation":1,"round":1,"loss":9})",
       Need::kNothing, true},
      {"losses", "GET", "/losses", "", Need::kSee},
      {"losses from", "GET", "/losses/0", "", Need::kSee},
      {"reconnect", "POST", "/reconnect", rank, Need::kNothing, true},
  };
}

TEST(Access, EveryMessageInEveryStateWithEveryWrongCredential) {
  GatedBox box;
  const JoinReply assembling = box.join("alice-assembling", "alice", "a");
  const JoinReply running = box.join("alice-running", "alice", "r");
  const JoinReply bobs = box.join("bob-running", "bob", "b");
  const JoinReply ended = box.join("alice-ended", "alice", "e");
  ControlClient(box.address, ended.job_token).remove("alice-ended", kMs);
  ASSERT_FALSE(running.job_token.empty());

  std::string prefix = box.token("alice"), other = prefix, other_job_token = running.job_token;
  prefix.pop_back();
  other.back() = other.back() == '0' ? '1' : '0';
  other_job_token.back() = other_job_token.back() == '0' ? '1' : '0';
  struct Shown {
    std::string name, bearer;
    bool observes = false, observes_all = false, trains = false;
  };
  const std::vector<Shown> credentials = {
      {"none", ""},
      {"wrong", make_token()},
      {"alice's, cut", prefix},
      {"alice's, another digit", other},
      {"alice's hash", hex_of(sha256(box.token("alice")))},
      {"the job's, another digit", other_job_token},
      {"expired", box.token("late")},
      {"another job's", box.token("bob"), false, true},
      {"another job's admin", box.token("bobs-admin"), false, true},
      {"another job's token", bobs.job_token},
      {"an ended job's token", ended.job_token},
      {"another job's ticket", bobs.offer.ticket},
      {"observer", box.token("watch"), true, true},
      {"trains, not more", box.token("alice"), true, true, true},
      {"too long", std::string(300, 'x')},
  };
  HttpClient client(box.address);
  const std::string before = box.everything();
  size_t refused = 0;
  for (const std::string job :
       {"alice-assembling", "alice-running", "alice-ended", "alice-absent"}) {
    for (const Shown& shown : credentials) {
      for (const Message& message : messages_about(box, job)) {
        if (message.need == Need::kSee && shown.observes) continue;
        if (message.need == Need::kTrain && shown.trains) continue;
        const HttpAnswer answer = client.request(message.method, "/v1/jobs/" + job + message.action,
                                                 shown.bearer, message.body, kMs);
        const std::string what = fmt::format("{} of {} with {}: {} {}", message.name, job,
                                             shown.name, answer.status, answer.body);
        // Whether there is a job is nobody's business who may not see it.
        const bool tells = message.ticket && !shown.bearer.empty();
        EXPECT_TRUE(answer.status == 401 || answer.status == 403 || (tells && answer.status == 404))
            << what;
        ++refused;
        if (box.everything() != before) FAIL() << "it changed something: " << what;
      }
    }
    for (const char* path : {"/v1/status", "/v1/jobs", "/metrics"}) {
      for (const Shown& shown : credentials) {
        const HttpAnswer answer = client.request("GET", path, shown.bearer, "", kMs);
        EXPECT_EQ(answer.status == 200, shown.observes_all) << path << " with " << shown.name;
        if (answer.status == 200 && !shown.observes) {  // bob's
          EXPECT_THAT(answer.body, HasSubstr("bob-running"));
          EXPECT_THAT(answer.body, ::testing::Not(HasSubstr("alice"))) << path;
        }
      }
    }
  }
  EXPECT_GT(refused, 500u);
  EXPECT_EQ(box.everything(), before);

  // The same messages with what is good for them.
  for (const JoinReply* reply : {&assembling, &running}) {
    ControlClient alice(box.address, box.token("alice"));
    EXPECT_EQ(alice.heartbeat(GatedBox::ticket_of(*reply)).completed_round, 0u);
    const JobStatus seen =
        ControlClient(box.address, reply->job_token).job_status(reply->spec.name);
    EXPECT_EQ(seen.ranks.size(), 1u);
    EXPECT_EQ(ControlClient(box.address, reply->job_token)
                  .join(box.join_request(reply->spec.name, "second"), kMs)
                  .rank,
              1u);
  }
  const HttpAnswer hyper =
      client.request("POST", "/v1/jobs/alice-running/hyper", box.token("root"),
                     R"({"rank":0,"incarnation":0,"values":{"grad_scale":9}})", kMs);
  EXPECT_EQ(hyper.status, 200u) << hyper.body;
  JoinRequest replaces = box.join_request("alice-running", "third", 0);
  replaces.replace = true;
  EXPECT_EQ(ControlClient(box.address, box.token("root")).join(replaces, kMs).incarnation, 2u);
  ControlClient(box.address, assembling.job_token).remove("alice-assembling", kMs);
  ControlClient(box.address, box.token("root")).remove("alice-running", kMs);
  EXPECT_EQ(box.on_control([&] { return box.server->status().jobs.size(); }), 1u);
}

// Pages and health are for everybody; everything else needs something.
TEST(Access, EveryRouteSaysWhatItNeeds) {
  size_t open = 0;
  for (const RouteInfo& route : http_routes()) {
    const bool of_rank = route.pattern.find("{incarnation}") != route.pattern.npos;
    const bool by_ticket = of_rank || (route.method == "POST" && !route.pattern.ends_with("/join"));
    if (route.need == Need::kNothing && !by_ticket) {
      ++open;
      EXPECT_THAT(route.pattern, ::testing::AnyOf("/", "/page.css", "/page.js", "/healthz",
                                                  "/readyz", "/v1/openapi.json"));
    }
  }
  EXPECT_EQ(open, 6u);
}

TEST(Access, ARepeatedJoinGetsAnotherJobTokenAndTheFirstIsVoid) {
  GatedBox box;
  const JoinReply first = box.join("alice-1", "alice", "one");
  const JoinReply again = box.join("alice-1", "alice", "one");
  EXPECT_EQ(again.incarnation, first.incarnation);
  EXPECT_NE(again.job_token, first.job_token);
  EXPECT_THROW(ControlClient(box.address, first.job_token).remove("alice-1", kMs), Error);
  // Another member is no owner, and the same id from somebody else is another join.
  EXPECT_EQ(box.join("alice-1", "alice", "two").job_token, "");
  const JoinReply stranger = box.join("alice-1", "root", "one");
  EXPECT_NE(stranger.rank, first.rank);
  EXPECT_EQ(stranger.job_token, "");
  ControlClient(box.address, again.job_token).remove("alice-1", kMs);
}

TEST(Access, TheCreatorOfAJobHasItsTokenInCToo) {
  GatedBox box;
  phub_options* options = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"server", box.address}, {"job", "alice-1"}, {"token", box.token("alice")}}) {
    ASSERT_EQ(phub_options_set(options, name.c_str(), value.c_str()), PHUB_OK) << phub_last_error();
  }
  ASSERT_EQ(phub_options_add_key(options, "w", 100), PHUB_OK);
  phub_options_set_number(options, "max_ranks", 2);
  phub_worker* creator = nullptr;
  ASSERT_EQ(phub_worker_create(options, &creator), PHUB_OK) << phub_last_error();
  const char* token = nullptr;
  ASSERT_EQ(phub_job_token(creator, &token), PHUB_OK);
  const std::string job_token = token;
  ASSERT_NE(job_token, "");

  // Another member joins with it, and gets none.
  ASSERT_EQ(phub_options_set(options, "token", token), PHUB_OK);
  phub_worker* member = nullptr;
  ASSERT_EQ(phub_worker_create(options, &member), PHUB_OK) << phub_last_error();
  ASSERT_EQ(phub_job_token(member, &token), PHUB_OK);
  EXPECT_EQ(std::string(token), "");
  EXPECT_EQ(phub_job_token(member, nullptr), PHUB_INVALID);
  phub_leave(member);
  phub_leave(creator);
  phub_worker_destroy(member);
  phub_worker_destroy(creator);
  phub_options_destroy(options);
  EXPECT_THROW(ControlClient(box.address, box.token("bob")).remove("alice-1", kMs), Error);
}

// A token that is removed, expires or is for other jobs now ends its ranks and its jobs' tokens.
TEST(Access, ARevokedTokenEndsItsRanks) {
  for (const std::string how : {"removed", "expired", "other jobs", "other role"}) {
    GatedBox box;
    const JoinReply first = box.join("alice-1", "alice", "one");
    const JoinReply by_job_token =
        ControlClient(box.address, first.job_token).join(box.join_request("alice-1", "two"), kMs);
    const JoinReply other = box.join("bob-1", "bob", "one");
    box.join("alice-1", "root", "stays");
    box.on_control([&] {
      std::vector<Token> tokens = box.tokens;
      if (how == "removed") tokens.erase(tokens.begin());
      if (how == "expired") tokens[0].expires_s = box.now_s;
      if (how == "other jobs") tokens[0].jobs = {"carol-*"};
      if (how == "other role") tokens[0].role = Role::kObserve;
      box.access->sweep(*box.server);  // nothing has changed yet
      box.access->replace(tokens);
      box.access->sweep(*box.server);
    });
    ControlClient client(box.address);
    for (const JoinReply* reply : {&first, &by_job_token}) {
      std::string error;
      for (int i = 0; i < 2000 && error.empty(); ++i) {  // until the cores have let go of it
        try {
          client.heartbeat(GatedBox::ticket_of(*reply));
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } catch (const Error& fenced) {
          error = fenced.what();
        }
      }
      EXPECT_THAT(error, HasSubstr(how == "removed"   ? "was revoked"
                                   : how == "expired" ? "has expired"
                                                      : "no longer covers this job"))
          << how;
    }
    EXPECT_THROW(box.join("alice-2", first.job_token, "x"), Error);
    EXPECT_THROW(box.join("alice-1", first.job_token, "x"), Error);
    EXPECT_THROW(box.join("alice-1", "alice", "x"), Error);
    EXPECT_EQ(client.heartbeat(GatedBox::ticket_of(other)).completed_round, 0u);
  }
}

// What a token's jobs have together is bounded; what others have is not, and what has ended counts
// no more.
TEST(Access, AQuotaBoundsWhatIsCreatedWithAToken) {
  GatedBox box;
  const auto set_quota = [&box](const Quota& quota) {
    box.on_control([&] {
      for (Token& token : box.tokens) token.quota = token.name == "alice" ? quota : Quota{};
      box.access->replace(box.tokens);
    });
  };
  const auto refusal = [&box](const std::string& job, const std::string& token) -> std::string {
    try {
      box.join(job, token, job);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFull);
      return error.what();
    }
  };
  set_quota({.jobs = 2});
  const JoinReply first = box.join("alice-1", "alice", "one");
  EXPECT_EQ(refusal("alice-2", "alice"), "");
  EXPECT_THAT(
      refusal("alice-3", "alice"),
      HasSubstr("the quota of token 'alice' is 2 jobs, and 0 jobs are free (alice-1 1 jobs, "
                "alice-2 1 jobs); job 'alice-3' needs 1 jobs"));
  // Ranks of what is there are no new job, and other tokens have quotas of their own.
  EXPECT_EQ(box.join("alice-1", "alice", "two").rank, 1u);
  EXPECT_EQ(box.join("alice-1", first.job_token, "three").rank, 2u);
  EXPECT_EQ(refusal("bob-1", "bob"), "");
  EXPECT_EQ(refusal("alice-4", "root"), "");
  ControlClient(box.address, box.token("root")).remove("alice-2", kMs);
  EXPECT_EQ(refusal("alice-3", "alice"), "");
  ControlClient(box.address, box.token("root")).remove("alice-3", kMs);

  // Each job has room for 4 ranks, and one key.
  set_quota({.ranks = 7});
  EXPECT_THAT(refusal("alice-2", "alice"), HasSubstr("7 ranks, and 3 ranks are free"));
  set_quota({.connections = 7});
  EXPECT_THAT(refusal("alice-2", "alice"), HasSubstr("7 connections, and 3 connections are free"));
  set_quota({.keys = 1});
  EXPECT_THAT(refusal("alice-2", "alice"), HasSubstr("1 keys, and 0 keys are free"));
  const uint64_t bytes =
      box.on_control([&] { return box.server->job_status("alice-1").memory_bytes; });
  set_quota({.memory = bytes + bytes / 2});
  EXPECT_THAT(refusal("alice-2", "alice"), HasSubstr("of memory are free (alice-1 "));
  set_quota({.ranks = 8, .keys = 2, .memory = 3 * bytes});
  EXPECT_EQ(refusal("alice-2", "alice"), "");
}

// However many jobs a token creates, they share the cores that its quota has.
TEST(Access, AQuotaOfCoresIsSharedByTheJobsOfAToken) {
  GatedBox box("pack:1 core:4 pu:1");
  box.on_control([&] {
    for (Token& token : box.tokens) {
      if (token.name == "alice") token.quota.cores = 2;
    }
    box.access->replace(box.tokens);
  });
  const auto cores_of = [&box](const std::string& job, const std::string& token) {
    box.join(job, token, job);
    std::set<uint32_t> cores;
    const JobStatus status = box.on_control([&] { return box.server->job_status(job); });
    for (const JobCoreStatus& core : status.cores) cores.insert(core.core);
    return cores;
  };
  const std::set<uint32_t> of_alice = cores_of("alice-1", "alice");
  EXPECT_EQ(of_alice.size(), 2u);
  EXPECT_EQ(cores_of("bob-1", "bob").size(), 4u);
  for (const char* job : {"alice-2", "alice-3"}) EXPECT_EQ(cores_of(job, "alice"), of_alice);
}

// Who, from where, what, and how it ended; and nothing secret.
TEST(Audit, WhatIsDoneAndRefusedLeavesALine) {
  GatedBox box;
  const JoinReply joined = box.join("alice-1", "alice", "one");
  ControlClient alice(box.address, box.token("alice"));
  alice.heartbeat(GatedBox::ticket_of(joined));
  alice.status();
  JoinRequest replaces = box.join_request("alice-1", "two", 0);
  replaces.replace = true;
  EXPECT_THROW(alice.join(replaces, kMs), Error);
  EXPECT_THROW(ControlClient(box.address, "phub-wrong").status(), Error);
  const JoinReply other = box.join("alice-1", "alice", "three");
  alice.leave(GatedBox::ticket_of(other));
  box.on_control([&] {
    for (JobStatus& job : box.server->status().jobs) EXPECT_EQ(job.name, "alice-1");
    box.access->replace({box.tokens.back()});  // root alone
    box.access->sweep(*box.server);
  });
  EXPECT_THROW(ControlClient(box.address, joined.job_token).remove("alice-1", kMs), Error);

  const std::string from = " from=127\\.0\\.0\\.1:[0-9]+ ";
  const auto lines = box.on_control([&] { return box.audit; });
  EXPECT_THAT(
      lines,
      ::testing::ElementsAre(
          ::testing::ContainsRegex(
              "^audit what=\"POST /v1/jobs/alice-1/join\" status=200 who=alice" + from +
              "rank=0 incarnation=1$"),
          ::testing::ContainsRegex("join\" status=403 who=alice" + from + "detail=\"replace takes"),
          ::testing::ContainsRegex("\"GET /v1/status\" status=401 who=-" + from + "detail="),
          ::testing::ContainsRegex("join\" status=200 who=alice" + from + "rank=1 incarnation=1$"),
          ::testing::ContainsRegex("leave\" status=200 who=-" + from + "rank=1 incarnation=1$"),
          ::testing::ContainsRegex("\"DELETE /v1/jobs/alice-1\" status=40[14] who=-" + from)));
  const auto notes = box.on_control([&] { return box.notes; });
  EXPECT_THAT(notes, ::testing::Contains("job 'alice-1': rank 0 (incarnation 1) is out: the token "
                                         "'alice' was revoked"));
  for (const std::string& line : lines) {
    for (const std::string& secret :
         {box.token("alice"), std::string("phub-wrong"), joined.job_token, joined.offer.ticket}) {
      EXPECT_EQ(line.find(secret), line.npos) << line;
    }
  }
}

TEST(Audit, AFloodOfStrangersIsFewLinesAndHidesNobody) {
  GatedBox box;
  const auto begin = std::chrono::steady_clock::now();
  HttpClient client(box.address);
  for (int i = 0; i < 500; ++i) client.request("GET", "/v1/status", "phub-wrong", "", kMs);
  box.join("alice-1", "alice", "one");
  const auto lines = box.on_control([&] { return box.audit; });
  EXPECT_GE(lines.size(), Notes::kBurst + 1);
  const auto lasted = std::chrono::steady_clock::now() - begin;
  // One line each second, and how many were left out before it.
  EXPECT_LT(lines.size(),
            Notes::kBurst + 30 + 2 * static_cast<size_t>(lasted / std::chrono::seconds(1)));
  EXPECT_THAT(lines.back(), HasSubstr("join\" status=200 who=alice"));
}

// Losses that only a timer notices, and the end of a job.
TEST(Audit, LossesAndEndsLeaveALine) {
  GatedBox box;
  JoinRequest request = box.join_request("alice-1", "one");
  request.spec.lease_ms = 50;
  ControlClient(box.address, box.token("alice")).join(request, kMs);
  std::vector<std::string> notes;
  for (int i = 0; i < 12000 && notes.size() < 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    notes = box.on_control([&] { return box.notes; });
  }
  EXPECT_THAT(notes,
              ::testing::UnorderedElementsAre(
                  "job 'alice-1': rank 0 (incarnation 1) is out: its lease of 50 ms expired",
                  "job 'alice-1' ended: every rank was lost, the last one (rank 0): its lease of "
                  "50 ms expired"));
}

}  // namespace access_test
}  // namespace phub
