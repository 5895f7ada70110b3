// The server with a transport in the test's hands: what fails or takes long in it, and which thread
// has to wait for that.
#include "phub/server.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "numa/topology.h"
#include "tests/phub/fake_parent.h"
#include "transport/shm/transport.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace server_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::StrEq;

// What the transport does besides, and what was done to it, on which thread.
struct Script {
  bool admit_finds_no_memory = false;
  std::mutex mutex;  // guards what follows
  std::vector<std::string> done;
  std::set<std::thread::id> threads;

  void note(const std::string& what) {
    const std::lock_guard lock(mutex);
    done.push_back(what);
    threads.insert(std::this_thread::get_id());
  }
};

class ScriptedLink final : public BoxLink {
 public:
  ScriptedLink(std::unique_ptr<BoxLink> link, Script& script)
      : link_(std::move(link)), script_(script) {}
  std::span<std::byte> results() override { return link_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return link_->endpoint(core); }
  void prepare(uint32_t rank) override {
    script_.note("prepare");
    link_->prepare(rank);
  }
  Offer admit(uint32_t rank, uint32_t incarnation) override {
    if (script_.admit_finds_no_memory) throw std::bad_alloc();
    return link_->admit(rank, incarnation);
  }
  void use_ticket(std::string ticket) override { link_->use_ticket(std::move(ticket)); }
  std::span<const std::byte> slots(uint32_t rank) override { return link_->slots(rank); }
  HeldMemory revoke(uint32_t rank) override {
    return {&script_, [rest = link_->revoke(rank), &script = script_](void*) {
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              script.note("give back");
            }};
  }
  void close() override { link_->close(); }
  bool slots_belong_to_worker() const override { return link_->slots_belong_to_worker(); }

 private:
  std::unique_ptr<BoxLink> link_;
  Script& script_;
};

class ScriptedTransport final : public Transport {
 public:
  explicit ScriptedTransport(Script& script) : transport_(make_shm_transport()), script_(script) {}
  std::string_view name() const override { return transport_->name(); }
  std::string describe() const override { return transport_->describe(); }
  bool shares_memory() const override { return transport_->shares_memory(); }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return std::make_unique<ScriptedLink>(transport_->open_job(layout), script_);
  }
  int event_fd() const override { return transport_->event_fd(); }
  void handle_events(std::vector<TransportEvent>& out) override { transport_->handle_events(out); }

 private:
  std::unique_ptr<Transport> transport_;
  Script& script_;
};

// Goes on as the test says, beside the time that passes.
class LeapingClock final : public Clock {
 public:
  uint64_t now_ms() const override { return clock_.now_ms() + leapt_ms_; }
  void leap(uint64_t ms) { leapt_ms_ += ms; }

 private:
  SteadyClock clock_;
  std::atomic<uint64_t> leapt_ms_ = 0;
};

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    ServerOptions options;
    options.topology = numa::from_synthetic("pack:1 core:2 pu:1");
    options.pin = false;
    options.note = [this](const std::string& line) { notes_.push_back(line); };
    std::vector<std::unique_ptr<Transport>> nics;
    nics.push_back(std::make_unique<ScriptedTransport>(script_));
    server_.emplace(std::move(options), std::move(nics), clock_);
  }

  // The answer comes into `to`, which outlives the server's part in it.
  void join(const std::string& job, int32_t rank, std::optional<Result<JoinReply>>& to) {
    JoinRequest request;
    request.spec.name = job;
    request.spec.keys = {{.name = "w", .elements = 100}};
    request.spec.world_size = 2;
    request.rank = rank;
    server_->join(std::move(request), [&to](Result<JoinReply> result) { to = std::move(result); });
  }
  // Without threads: all that is to be done now.
  void run() {
    for (int i = 0; i < 20; ++i) {
      server_->poll();
      for (uint32_t core = 0; core < server_->machine().cores(); ++core)
        server_->machine().core(core).step();
    }
  }
  template <typename Condition>
  void poll_until(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < until) {
      server_->poll();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(condition());
  }

  // Both ranks have joined.
  std::vector<Credential> begin(const std::string& job) {
    std::vector<std::optional<Result<JoinReply>>> joined(2);
    for (int32_t rank = 0; rank < 2; ++rank) join(job, rank, joined[rank]);
    run();
    std::vector<Credential> ranks;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (!joined[rank] || !*joined[rank]) ADD_FAILURE() << job << " has not begun";
      const JoinReply& reply = *joined[rank]->value;
      ranks.push_back({job, rank, reply.incarnation, reply.offer.ticket});
    }
    return ranks;
  }
  void leave(const Credential& who) {
    server_->leave(who, [](const Result<Done>&) {});
    run();
  }
  // Rank 0 is not heard of for longer than its lease.
  void lose_first(const std::vector<Credential>& ranks) {
    for (int i = 0; i < 5000 && server_->job_status("job").ranks[0].state == "live"; ++i) {
      clock_.leap(20);
      EXPECT_EQ(heartbeat(ranks[1]), "");
      run();
    }
    EXPECT_EQ(server_->job_status("job").ranks[0].state, "lost");
  }
  // "" or what the rank reads.
  std::string heartbeat(const Credential& who) {
    const auto refused = error_of([&] { server_->heartbeat(who, [](const Result<Pulse>&) {}); });
    return refused ? std::string(name_of(refused->code())) + ": " + refused->what() : "";
  }

  Script script_;
  LeapingClock clock_;
  std::vector<std::string> notes_;
  std::optional<Server> server_;
};

TEST_F(ServerTest, ANewTextOfASubjectIsNotedOnceAMinute) {
  const std::vector<Credential> ranks = begin("job");
  const auto noted = [&](const std::string& subject, const std::string& text) {
    const size_t before = notes_.size();
    server_->remark(ranks[0], {.remark = {.subject = subject, .text = text}},
                    [](const Result<Done>& done) { EXPECT_TRUE(done); });
    run();
    if (!text.empty()) EXPECT_EQ(server_->job_status("job").remarks.back().text, text);
    return notes_.size() - before;
  };
  EXPECT_EQ(noted("rate", "0.1"), 1u);
  EXPECT_EQ(noted("rate", "0.2"), 0u);
  EXPECT_EQ(noted("rate", ""), 0u);
  EXPECT_EQ(noted("rate", "0.3"), 0u);
  clock_.leap(30'000);
  EXPECT_EQ(noted("rate", "0.4"), 0u);
  EXPECT_EQ(noted("factors", "fc6"), 1u);
  EXPECT_EQ(noted("factors", ""), 0u);
  clock_.leap(30'000);
  EXPECT_EQ(noted("rate", "0.5"), 1u);
  EXPECT_EQ(noted("rate", "0.6"), 0u);
}

TEST_F(ServerTest, AnAdmissionWithoutMemoryIsARefusedJoin) {
  std::optional<Result<JoinReply>> refused, admitted;
  script_.admit_finds_no_memory = true;
  join("job", 0, refused);
  run();
  ASSERT_TRUE(refused);
  EXPECT_FALSE(*refused);
  EXPECT_EQ(refused->code, ErrorCode::kFull);
  EXPECT_THAT(refused->message, HasSubstr("out of memory"));
  script_.admit_finds_no_memory = false;
  join("job", 0, admitted);
  run();
  ASSERT_TRUE(admitted);
  EXPECT_TRUE(*admitted) << admitted->message;
}

// Each is planned with those before it, although none of them was there when it was asked for.
TEST_F(ServerTest, JobsThatComeTogetherShareTheCores) {
  std::optional<Result<JoinReply>> one, two;
  join("one", 0, one);
  join("two", 0, two);
  run();
  ASSERT_TRUE(one && *one && two && *two);
  EXPECT_NE(one->value->layout.queue_chunks, two->value->layout.queue_chunks);
}

// Unmapping many gigabytes takes a while: the control thread does not wait for it. A successor's
// memory does.
TEST_F(ServerTest, WhatARankHadIsGivenBackInTheBackground) {
  std::optional<Result<JoinReply>> first, second;
  std::optional<Result<Done>> left;
  server_->start_threads();
  join("job", 0, first);
  poll_until([&] { return first.has_value(); });
  ASSERT_TRUE(*first) << first->message;
  join("job", 1, second);
  poll_until([&] { return second.has_value(); });
  ASSERT_TRUE(*second) << second->message;
  const Credential who{"job", 1, second->value->incarnation, second->value->offer.ticket};
  server_->leave(who, [&](Result<Done> result) { left = std::move(result); });
  poll_until([&] { return left.has_value(); });
  second.reset();
  join("job", 1, second);
  poll_until([&] { return second.has_value(); });
  EXPECT_TRUE(*second) << second->message;
  server_->stop_threads();
  EXPECT_THAT(script_.done, ElementsAre("prepare", "prepare", "give back", "prepare"));
  EXPECT_FALSE(script_.threads.contains(std::this_thread::get_id()));
  server_.reset();  // while the script is there
}

constexpr const char* kItsLease = "rank 0 (incarnation 1) is out: its lease of ";

TEST_F(ServerTest, ALostRankReadsWhyAlsoAfterItsJobHasEndedWell) {
  const std::vector<Credential> ranks = begin("job");
  lose_first(ranks);
  EXPECT_THAT(heartbeat(ranks[0]), StartsWith(std::string("fenced: ") + kItsLease));
  leave(ranks[1]);
  ASSERT_FALSE(server_->has_job("job"));
  const auto reads_what_became_of_it = [&] {
    EXPECT_THAT(heartbeat(ranks[0]),
                AllOf(StartsWith(std::string("fenced: ") + kItsLease),
                      HasSubstr("job 'job' has ended well since, without it")));
    EXPECT_THAT(heartbeat(ranks[1]),
                StartsWith("not_found: rank 1 has left job 'job', which has ended well since"));
  };
  reads_what_became_of_it();
  begin("job");  // another one of its name
  reads_what_became_of_it();
  Credential stranger = ranks[0];
  stranger.ticket = "guessed";
  EXPECT_THAT(heartbeat(stranger), Not(HasSubstr("lease")));
}

TEST_F(ServerTest, AJobThatNobodyBeganHasNotEndedWell) {
  std::optional<Result<JoinReply>> joined;
  join("job", 0, joined);
  run();
  for (int i = 0; i < 5000 && server_->has_job("job"); ++i) {
    clock_.leap(20);
    run();
  }
  const auto gone = error_of([&] { server_->job_status("job"); });
  ASSERT_TRUE(gone);
  EXPECT_THAT(gone->what(), AllOf(HasSubstr("ended: all who had joined were lost before it"),
                                  HasSubstr("its lease of ")));
}

TEST_F(ServerTest, AJobThatFailedSaysSoToAllWhoAskForIt) {
  const std::vector<Credential> ranks = begin("job");
  lose_first(ranks);
  server_->remove("job", [](const Result<Done>&) {});
  run();
  ASSERT_FALSE(server_->has_job("job"));
  EXPECT_THAT(heartbeat(ranks[0]),
              AllOf(HasSubstr(kItsLease), HasSubstr("then job 'job' ended: the job was deleted")));
  EXPECT_EQ(heartbeat(ranks[1]), "not_found: the job was deleted");
  const auto by_name = error_of([&] { server_->job_status("job"); });
  ASSERT_TRUE(by_name);
  EXPECT_STREQ(by_name->what(),
               "there is no job 'job' now: the last of this name ended: the job was deleted");
  EXPECT_THAT(error_of([&] { server_->job_status("another"); })->what(),
              StrEq("there is no job 'another'"));
}

EndedJob ended_job(const std::string& name, uint64_t ended_ms) {
  return {.name = name,
          .log = MembershipLog(1),
          .members = {{.incarnation = 1, .ticket = "ticket", .lost = "its lease expired"}},
          .error = {},
          .ended_ms = ended_ms};
}

std::string refused(const EndedJobs& jobs, const std::string& name) {
  const auto why = error_of([&] { jobs.refuse_if_member({name, 0, 1, "ticket"}); });
  return why ? why->what() : "";
}

TEST(EndedJobs, AreKeptForADayWhileThereIsMemory) {
  EndedJobs jobs;
  jobs.add(ended_job("one", 0));
  jobs.add(ended_job("two", 1000));
  jobs.tick(EndedJobs::kKeptMs - 1);
  EXPECT_THAT(refused(jobs, "one"), HasSubstr("its lease expired"));
  jobs.tick(EndedJobs::kKeptMs);
  EXPECT_EQ(refused(jobs, "one"), "");
  EXPECT_THAT(refused(jobs, "two"), HasSubstr("its lease expired"));
  EXPECT_THAT(jobs.not_found("one"), HasSubstr("the last of this name ended well"));
  jobs.make_room(MemoryBudget(0));
  EXPECT_EQ(refused(jobs, "two"), "");
  for (size_t i = 0; i <= EndedJobs::kMostJobs; ++i) jobs.add(ended_job("more", 2000));
  EXPECT_EQ(jobs.not_found("two"), "there is no job 'two'");
}

TEST(MemoryBudget, CountsAJoinBeforeItIsDecoded) {
  constexpr uint64_t kKeys = 10'000;
  std::string text;
  for (uint64_t key = 0; key < kKeys; ++key) text += fmt::format(R"({{"name":"{}"}},)", key);
  MemoryBudget budget(kKeys * 2 * sizeof(KeySpec));
  EXPECT_EQ(budget.hold_for_join("{}"), nullptr) << "nearly nothing";
  std::shared_ptr<void> held = budget.hold_for_join(text);
  EXPECT_EQ(error_of([&] { budget.hold_for_join(text); })->code(), ErrorCode::kUnavailable)
      << "when the first is done there is room";
  held.reset();
  EXPECT_NE(budget.hold_for_join(text), nullptr);
  budget.grow(0, kKeys * sizeof(KeySpec));
  EXPECT_EQ(error_of([&] { budget.hold_for_join(text); })->code(), ErrorCode::kFull);
}

// A box without threads, with one transport.
Server server_of(std::unique_ptr<Transport> transport, const Clock& clock,
                 Parent* parent = nullptr) {
  ServerOptions options;
  options.topology = numa::from_synthetic("pack:1 core:2 pu:1");
  options.pin = false;
  options.parent = parent;
  std::vector<std::unique_ptr<Transport>> nics;
  nics.push_back(std::move(transport));
  return {std::move(options), std::move(nics), clock};
}

// What its workers ask a box that was started again.
std::optional<ErrorCode> code_of_heartbeat(Parent* parent, uint64_t epoch) {
  SteadyClock clock;
  Server server = server_of(make_shm_transport(), clock, parent);
  const Credential who{.job = "job", .incarnation = 1, .ticket = "ticket", .epoch = epoch};
  const std::optional<Error> refused =
      error_of([&] { server.heartbeat(who, [](const Result<Pulse>&) {}); });
  return refused ? std::optional(refused->code()) : std::nullopt;
}

// Its job is the parent's, which is saved there.
TEST(ServerBelowAParent, WorkersOfARackThatDiedJoinAgain) {
  testing::FakeParent parent;
  EXPECT_EQ(code_of_heartbeat(&parent, 3), ErrorCode::kRewound);
  EXPECT_EQ(code_of_heartbeat(&parent, 0), ErrorCode::kNotFound) << "nobody saves the job";
  EXPECT_EQ(code_of_heartbeat(nullptr, 3), ErrorCode::kNotFound);
}

TEST(ServerAboveRacks, NewsNameRanksOfTheRack) {
  SteadyClock clock;
  Server server = server_of(make_tcp_transport(), clock);
  JoinRequest request;
  request.spec.name = "job";
  request.spec.keys = {{.name = "w", .elements = 100}};
  request.spec.world_size = request.spec.max_ranks = 2;
  request.spec.rack_ranks = {2, 3};
  request.rank = 1;
  request.transport = "tcp";
  std::optional<Result<JoinReply>> joined;
  server.join(request, [&](Result<JoinReply> result) { joined = std::move(result); });
  for (int i = 0; i < 20; ++i) {
    server.poll();
    for (uint32_t core = 0; core < server.machine().cores(); ++core)
      server.machine().core(core).step();
  }
  ASSERT_TRUE(joined && *joined) << joined->message;
  const Credential who{"job", 1, joined->value->incarnation, joined->value->offer.ticket};
  const auto says = [&](std::vector<uint32_t> live) -> std::string {
    const std::optional<Error> refused = error_of([&] {
      server.tell(who, {.name = "box", .live = std::move(live)}, [](const Result<Done>&) {});
    });
    return refused ? refused->what() : "";
  };
  EXPECT_EQ(says({2, 4}), "");
  EXPECT_THAT(says({1, 2}), HasSubstr("has the ranks 2 to 4, and rank 1 is not its"));
  EXPECT_THAT(says({4, 5}), HasSubstr("has the ranks 2 to 4, and rank 5 is not its"));
  EXPECT_THAT(says({4, 2}), HasSubstr("must ascend, and rank 2 comes after 4"));
  EXPECT_THAT(says({3, 3}), HasSubstr("must ascend, and rank 3 comes after 3"));
  const std::vector<RankStatus> ranks = server.job_status("job").ranks;
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_THAT(ranks.front().rack_live, ElementsAre(2, 4)) << "nothing else of it counts";
}

}  // namespace server_test
}  // namespace phub
