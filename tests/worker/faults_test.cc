// Real processes that are killed, stopped, replaced, or lose their server.
//
// PHUB_TEST_SCALE multiplies the numbers of repetitions (20: the thousand kills of a release).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/fault_oracle.h"
#include "tests/worker/process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::testing {
namespace faults_test {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::scaled;
using Kind = LogRecord::Kind;

uint64_t seed() {
  const char* text = std::getenv("PHUB_SEED");
  const uint64_t seed = text ? std::stoull(text) : std::random_device{}();
  fmt::print("PHUB_SEED={}\n", seed);
  return seed;
}

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

TEST(Faults, AWorkerKilledInMidRoundAsThePolicySays) {
  Box box;
  for (const char* policy : {"shrink", "wait", "fail"}) {
    for (const bool successor : {false, true}) {
      const std::string name = fmt::format("{}-{}", policy, successor ? "successor" : "alone");
      SCOPED_TRACE(name);
      if (successor && name.starts_with("fail")) continue;
      JobSpec spec = fault_spec(name, 3, successor ? "adam" : "none");
      spec.on_loss = policy;
      if (!successor) spec.wait_limit_ms = 700;
      Training training(box.address(), spec);
      Process &zero = training.start(0), &one = training.start(1);
      Process& victim = training.start(2, {"--die-in", "20"});
      EXPECT_EQ(victim.wait(kLong), -SIGKILL) << victim.output();

      if (std::string_view(policy) == "shrink" || successor) {
        if (successor) {
          Process& next = training.start(2, {"--patient"});
          ASSERT_TRUE(next.printed("joined rank 2 incarnation 2 round ", kLong)) << next.output();
        }
        EXPECT_TRUE(training.goes_on(50));
        training.end();
        EXPECT_TRUE(left(zero) && left(one)) << zero.output() << one.output();
      } else {
        EXPECT_EQ(zero.wait(kLong), 3);
        EXPECT_EQ(one.wait(kLong), 3);
        const char* says = std::string_view(policy) == "fail"
                               ? "rank 2 (incarnation 1) was lost in round 2"
                               : "the job waited 700 ms for rank 2 to come back";
        EXPECT_THAT(zero.output(), HasSubstr("\nrank_lost: "));
        EXPECT_THAT(zero.output(), HasSubstr(says));
        EXPECT_THAT(one.output(), HasSubstr(says));
      }
      training.check();

      // Keys 3 and 2 were pushed in round 20, keys 1 and 0 were not.
      const std::vector<LogRecord> log = training.log();
      const auto lost = std::ranges::find(log, Kind::kLost, &LogRecord::kind);
      ASSERT_NE(lost, log.end());
      EXPECT_EQ(lost->rank, 2u);
      EXPECT_THAT(lost->reason, HasSubstr("the process ended"));
      EXPECT_EQ(lost->last_rounds.front().round, 19u);
      if (name != "wait-successor") continue;
      const auto back = std::ranges::find_if(log, [](const LogRecord& record) {
        return record.kind == Kind::kAdmitted && record.incarnation == 2;
      });
      ASSERT_NE(back, log.end());
      EXPECT_THAT(back->round, AnyOf(20u, 21u));  // nobody went on without it
    }
  }
}

// The kernel tells of the end of a process at once: nobody waits for its lease. Also when a child
// that it forked lives on, with all descriptors that it had.
TEST(Faults, AKilledWorkerIsNoticedBeforeItsLease) {
  Box box;
  for (const bool forked : {false, true}) {
    SCOPED_TRACE(forked ? "with a child" : "alone");
    JobSpec spec = fault_spec(forked ? "forked" : "plain", 2, "none");
    spec.lease_ms = 600'000;
    Training training(box.address(), spec);
    Process& stays = training.start(0);
    Process& victim = training.start(1, forked ? Flags{"--fork"} : Flags{});
    ASSERT_TRUE(training.goes_on(5));
    pid_t child = 0;
    if (forked) {
      ASSERT_TRUE(victim.printed("child ", kLong));
      const std::string output = victim.output();
      child = std::stoi(output.substr(output.find("child ") + 6));
      ASSERT_EQ(kill(child, 0), 0);
    }
    victim.send(SIGKILL);
    EXPECT_TRUE(becomes([&] {
      const auto log = training.log();
      const auto lost = std::ranges::find(log, Kind::kLost, &LogRecord::kind);
      return lost != log.end() && lost->rank == 1 &&
             lost->reason.find("the process ended") != std::string::npos;
    }));
    EXPECT_TRUE(training.goes_on(20));
    if (child > 0) {
      EXPECT_EQ(kill(child, SIGKILL), 0) << "the child was to live on";
    }
    training.end();
    EXPECT_TRUE(left(stays)) << stays.output();
  }
}

// "joined rank 2 incarnation 7 …": its place, if it was in the job.
std::optional<std::pair<uint32_t, uint32_t>> place_of(const Process& worker) {
  const std::string output = worker.output();
  uint32_t rank = 0, incarnation = 0;
  if (std::sscanf(output.c_str(), "joined rank %u incarnation %u ", &rank, &incarnation) != 2) {
    return std::nullopt;
  }
  return std::pair(rank, incarnation);
}

// A job of three in which somebody is killed again and again, at any moment, and somebody else
// comes.
void kill_at_random(Box& box, const JobSpec& spec, uint32_t kills, std::mt19937_64& random) {
  SCOPED_TRACE(spec.name);
  Training training(box.address(), spec);
  std::vector<Process*> now(3);
  for (uint32_t rank = 0; rank < 3; ++rank) now[rank] = &training.start(static_cast<int32_t>(rank));
  ASSERT_TRUE(training.goes_on(2));
  std::vector<std::pair<uint32_t, uint32_t>> killed;  // members of the job
  for (uint32_t i = 0; i < kills; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40000));
    const auto rank = static_cast<uint32_t>(random() % 3);
    // Perhaps before it has joined, even; but somebody has to be there who knows the parameters:
    // not one who was killed just now, and whose loss the box has not noticed yet.
    if (random() % 2) {
      ASSERT_TRUE(now[rank]->printed("joined", kLong)) << now[rank]->output();
    }
    ASSERT_TRUE(becomes([&] {
      const std::vector<RankStatus> ranks = training.status().ranks;
      return std::ranges::any_of(ranks, [&](const RankStatus& other) {
        return other.state == "live" && other.rank != rank &&
               place_of(*now[other.rank]) == std::pair(other.rank, other.incarnation);
      });
    }));
    now[rank]->send(SIGKILL);
    ASSERT_EQ(now[rank]->wait(kLong), -SIGKILL) << now[rank]->output();
    if (const auto place = place_of(*now[rank])) killed.push_back(*place);
    Flags flags = {"--patient"};  // the one before may be joining still, as far as the box knows
    if (random() % 2) flags.push_back("--replace");
    now[rank] = &training.start(static_cast<int32_t>(rank), flags);
  }
  for (Process* worker : now) ASSERT_TRUE(worker->printed("joined", kLong)) << worker->output();
  EXPECT_TRUE(training.goes_on(10));
  training.end();
  for (Process* worker : now) EXPECT_TRUE(left(*worker)) << worker->output();
  training.check();

  // Who was killed in the job is lost, each once; and half of them are waited for to be in it.
  EXPECT_GE(killed.size(), kills / 8);
  const std::vector<LogRecord> log = training.log();
  for (const auto& [rank, incarnation] : killed) {
    EXPECT_EQ(
        std::ranges::count_if(log,
                              [&rank = rank, &incarnation = incarnation](const LogRecord& record) {
                                return record.kind == Kind::kLost && record.rank == rank &&
                                       record.incarnation == incarnation;
                              }),
        1)
        << "rank " << rank << " incarnation " << incarnation;
  }
}

TEST(Faults, KillsAtRandomMoments) {
  std::mt19937_64 random(seed());
  Box box;
  for (uint32_t job = 0; job < scaled(2); ++job) {
    JobSpec spec = fault_spec(fmt::format("kills-{}", job), 3, job % 2 ? "adam" : "none");
    spec.on_loss = job % 4 < 2 ? "shrink" : "wait";
    kill_at_random(box, spec, 25, random);
  }
}

TEST(Faults, AStoppedWorkerThatWasReplacedChangesNothing) {
  std::mt19937_64 random(seed());
  Box box;
  Training training(box.address(), fault_spec("stopped", 3, "adam"));
  std::vector<Process*> now;
  for (int32_t rank = 0; rank < 3; ++rank) now.push_back(&training.start(rank));
  ASSERT_TRUE(training.goes_on(5));
  for (uint32_t i = 0; i < scaled(3); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    const auto rank = static_cast<uint32_t>(random() % 3);
    Process& old = *now[rank];
    old.send(SIGSTOP);
    now[rank] = &training.start(static_cast<int32_t>(rank), {"--patient"});
    ASSERT_TRUE(now[rank]->printed("joined", kLong)) << now[rank]->output();
    EXPECT_TRUE(training.goes_on(5));
    old.send(SIGCONT);
    EXPECT_TRUE(training.goes_on(20));
    EXPECT_EQ(old.wait(kLong), 3);
    EXPECT_THAT(old.output(), HasSubstr("fenced: "));
    EXPECT_THAT(old.output(), HasSubstr(fmt::format(" of rank {} was replaced", rank)));
  }
  training.end();
  training.check();
}

// Detection: from the kill, or the stop, until the rank is out of the job on every core.
TEST(Faults, ADeadOrStoppedWorkerIsNoticedInTime) {
  constexpr uint32_t kRanks = 10, kLeaseMs = 2000;
  std::mt19937_64 random(seed());
  Box box;
  std::vector<double> ms;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (uint32_t repetition = 0; repetition < scaled(1); ++repetition) {
      const std::string name = fmt::format("detect-{}-{}", signal, repetition);
      JobSpec spec = fault_spec(name, kRanks, "none");
      spec.lease_ms = kLeaseMs;
      Training training(box.address(), spec);
      std::vector<Process*> workers;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        workers.push_back(&training.start(static_cast<int32_t>(rank), {"--idle"}));
      }
      for (Process* worker : workers) ASSERT_TRUE(worker->printed("joined", kLong));
      std::vector<Clock::time_point> at(kRanks);
      std::vector<bool> noticed(kRanks);
      for (uint32_t rank = 0; rank < kRanks - 1; ++rank) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 50000));
        workers[rank]->send(signal);
        at[rank] = Clock::now();
      }
      EXPECT_TRUE(becomes([&] {
        uint32_t missing = 0;
        for (const RankStatus& rank : training.status().ranks) {
          if (rank.rank == kRanks - 1 || noticed[rank.rank]) continue;
          noticed[rank.rank] = rank.state == "lost";
          missing += !noticed[rank.rank];
          if (noticed[rank.rank]) ms.push_back(ms_since(at[rank.rank]));
        }
        return missing == 0;
      }));
      EXPECT_EQ(training.rank(kRanks - 1).state, "live");
      for (Process* worker : workers) worker->send(SIGCONT);
      workers.back()->send(SIGTERM);
      EXPECT_TRUE(left(*workers.back()));
    }
  }
  std::ranges::sort(ms);
  ASSERT_FALSE(ms.empty());
  const double p99 = ms[std::min(ms.size() - 1, ms.size() * 99 / 100)];
  fmt::print("lease {} ms, {} times noticed: median {:.0f} ms, p99 {:.0f} ms, most {:.0f} ms\n",
             kLeaseMs, ms.size(), ms[ms.size() / 2], p99, ms.back());
}

// The real server, with three workers that train, one that waits and one at a barrier.
class ServerFaults : public ::testing::Test {
 protected:
  void SetUp() override { address_ = server_.listening_address(); }

  // Ends the server and measures until the last worker knows.
  void end_server(int signal) {
    Training training(address_, fault_spec("orphans", 3, "adam"));
    std::vector<Process*> workers;
    for (int32_t rank = 0; rank < 3; ++rank) workers.push_back(&training.start(rank));
    ASSERT_TRUE(training.goes_on(5));

    JobSpec spec = fault_spec("waiting", 3, "none");
    std::vector<std::future<ErrorCode>> here;
    std::atomic<int> ready{0};
    for (int32_t rank = 0; rank < 3; ++rank) {
      here.push_back(std::async(std::launch::async, [&, rank] {
        try {
          WorkerOptions options{.server = address_, .spec = spec, .rank = rank};
          Worker worker(options);
          worker.wait_all();
          ++ready;
          if (rank == 0) worker.push_pull(3);
          if (rank == 1) worker.barrier();
          for (;;) {  // neither waits nor pushes: it learns from its heartbeats
            worker.test(0);
            std::this_thread::sleep_for(milliseconds(10));
          }
        } catch (const Error& error) {
          return error.code();
        }
      }));
    }
    ASSERT_TRUE(becomes([&] { return ready == 3; }));
    std::this_thread::sleep_for(milliseconds(50));

    const auto begin = Clock::now();
    server_.send(signal);
    status_ = server_.wait(kLong);
    fmt::print("the server ended after {:.0f} ms", ms_since(begin));
    for (Process* worker : workers) {
      EXPECT_EQ(worker->wait(kLong), 3);
      EXPECT_THAT(worker->output(), HasSubstr("unavailable: "));
    }
    for (auto& code : here) EXPECT_EQ(code.get(), ErrorCode::kUnavailable);
    fmt::print(", the last worker knew after {:.0f} ms\n", ms_since(begin));
  }

  const TemporaryDirectory directory_;
  Process server_{{PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--pin", "false",
                   "--socket-dir", directory_.path() + "/sockets"},
                  directory_.path() + "/server.out"};
  std::string address_;
  std::optional<int> status_;
};

TEST_F(ServerFaults, WorkersOfAKilledServerEndWithAnError) {
  end_server(SIGKILL);
  EXPECT_EQ(status_, -SIGKILL);
}

TEST_F(ServerFaults, AServerThatIsToldToEndDoesSoWithWorkersInIt) {
  end_server(SIGTERM);
  EXPECT_EQ(status_, 0) << server_.output();
}

}  // namespace faults_test
}  // namespace phub::testing
