// Boxes that serve under a server, as processes: what they have of its jobs, and what happens when
// one of them dies. (Most of what jobs do runs over shards, too: ctest's tests shards/….)
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/fault_oracle.h"
#include "tests/worker/server_process.h"
#include "tests/worker/shard_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "transport/control/http_client.h"

namespace phub::testing {
namespace shards_test {

using ::testing::HasSubstr;

// By the transport of rank 0: with "auto" it exchanges over memory, and rank 1 over TCP.
class ShardsTest : public ::testing::TestWithParam<const char*> {
 protected:
  explicit ShardsTest(const Flags& lease = kShortShardLease)
      : server_(PHUB_BINARY, {"--transports", "tcp", lease.at(0), lease.at(1)}) {}
  ServerStatus status() const { return ControlClient(server_.address()).status(); }
  ::testing::AssertionResult becomes_of(size_t shards) const {
    if (becomes([&] { return status().shards.size() == shards; })) {
      return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << status().shards.size() << " shards, not " << shards;
  }
  static JobSpec spec(const std::string& name) {
    JobSpec spec = fault_spec(name, 2, "adam");
    spec.on_loss = "shrink";
    return spec;
  }
  // How many arrivals each box has had for it.
  std::vector<uint64_t> arrivals(const std::string& job) const {
    std::vector<uint64_t> of_box;
    for (const JobStatus& one : status().jobs) {
      if (one.name != job) continue;
      for (const JobCoreStatus& core : one.cores) {
        of_box.resize(std::max<size_t>(of_box.size(), core.box + 1));
        of_box[core.box] += core.counters.receives;
      }
    }
    return of_box;
  }

  ShardProcess& start_shard(const Flags& flags = {}) {
    return *shards_.emplace_back(
        std::make_unique<ShardProcess>(PHUB_BINARY, server_.address(), flags));
  }

  std::vector<std::unique_ptr<ShardProcess>> shards_;  // end after the server, which ends its jobs
  const ServerProcess server_;
  const Flags first_ = {"--transport", GetParam()}, tcp_ = {"--transport", "tcp"};
};

TEST_P(ShardsTest, AShardThatIsKilledEndsItsJobsAndTheNextOnesDoWithoutIt) {
  ShardProcess& shard = start_shard();
  ASSERT_TRUE(becomes_of(1));
  Training training(server_.address(), spec("killed"));
  Process& worker = training.start(0, first_);
  training.start(1, tcp_);
  ASSERT_TRUE(training.goes_on(10));
  shard.end(SIGKILL);
  ASSERT_TRUE(worker.wait(kLong).has_value());
  ASSERT_TRUE(becomes_of(0));
  ASSERT_TRUE(becomes([&] { return status().jobs.empty(); })) << "its cores there count as gone";
  training.end();

  Training next(server_.address(), spec("next"));
  next.start(0, first_);
  next.start(1, tcp_);
  ASSERT_TRUE(next.goes_on(10));
  EXPECT_EQ(arrivals("next").size(), 1u);
  next.end();
  next.check();

  start_shard();
  ASSERT_TRUE(becomes_of(1));
  Training last(server_.address(), spec("last"));
  last.start(0, first_);
  last.start(1, tcp_);
  ASSERT_TRUE(last.goes_on(10));
  EXPECT_EQ(arrivals("last").size(), 2u);
  last.end();
  last.check();
}

// Its lease is longer than the test: nobody waits for that.
class ShardsWithALongLease : public ShardsTest {
 protected:
  ShardsWithALongLease() : ShardsTest({"--shard-lease-ms", "600000"}) {}
};

TEST_P(ShardsWithALongLease, AShardThatIsEndedSaysSo) {
  ShardProcess& shard = start_shard();
  ASSERT_TRUE(becomes_of(1));
  Training training(server_.address(), spec("ended"));
  Process& worker = training.start(0, first_);
  training.start(1, tcp_);
  ASSERT_TRUE(training.goes_on(10));
  shard.end(SIGTERM);
  ASSERT_TRUE(becomes_of(0));
  ASSERT_TRUE(worker.wait(kLong).has_value());
  EXPECT_THAT(worker.output(), HasSubstr("had a part of it, and is lost"));
  EXPECT_TRUE(becomes([&] { return status().jobs.empty(); }));
}

// The join goes on trying until the box is lost, and the job is made over the others.
TEST_P(ShardsTest, AShardThatDiesWhileAJobIsMadeHoldsUpNobodyForLong) {
  start_shard();
  ASSERT_TRUE(becomes_of(1));
  ShardProcess& dies = start_shard();
  ASSERT_TRUE(becomes_of(2));
  dies.stop();
  Training training(server_.address(), spec("made"));
  training.start(0, first_);
  training.start(1, tcp_);
  ASSERT_TRUE(becomes([&] { return status().memory_bytes > 0; }));
  EXPECT_TRUE(status().jobs.empty()) << "it is being made";
  dies.end(SIGKILL);
  ASSERT_TRUE(training.goes_on(10));
  ASSERT_TRUE(becomes_of(1));
  EXPECT_EQ(arrivals("made").size(), 2u);
  training.end();
  training.check();
  EXPECT_TRUE(becomes([&] { return status().memory_bytes == 0; }));
}

// It finds out that it is lost, ends what it had, and serves again.
TEST_P(ShardsTest, AShardThatHangsForALeaseIsLostAndComesBack) {
  ShardProcess& shard = start_shard();
  ASSERT_TRUE(becomes_of(1));
  Training training(server_.address(), spec("hangs"));
  Process& worker = training.start(0, first_);
  training.start(1, tcp_);
  ASSERT_TRUE(training.goes_on(10));
  shard.stop();
  ASSERT_TRUE(becomes_of(0));
  ASSERT_TRUE(worker.wait(kLong).has_value());
  EXPECT_THAT(worker.output(), HasSubstr("had a part of it, and is lost"));
  shard.go_on();
  ASSERT_TRUE(becomes_of(1)) << shard.output();
  Training next(server_.address(), spec("next"));
  next.start(0, first_);
  next.start(1, tcp_);
  ASSERT_TRUE(next.goes_on(10));
  EXPECT_EQ(arrivals("next").size(), 2u);
  next.end();
  next.check();
}

// By a box that has no part of the job that it names.
TEST_P(ShardsTest, CopiesThatNobodyWantsAreRefused) {
  start_shard();
  ASSERT_TRUE(becomes_of(1));
  Training training(server_.address(), spec("copied"));
  training.start(0, first_);
  training.start(1, tcp_);
  ASSERT_TRUE(training.goes_on(10));
  ASSERT_EQ(arrivals("copied").size(), 2u);
  ControlClient stranger(server_.address());
  const ShardHello hello{
      .name = "stranger", .nodes = {{}}, .cores = {{}}, .transports = {"tcp"}, .nics = {}};
  const uint64_t self = stranger.join_shard(hello).shard;
  HttpClient http(server_.address());
  const auto status_of = [&](std::string_view method, const std::string& place, size_t bytes) {
    const std::string target = fmt::format("/v1/shards/{}/copies/{}", self, place);
    return http.request(method, target, "", std::string(bytes, 'x'), 30000, kBytesType).status;
  };
  for (const std::string job : {"1", "2", "3", "99"}) {
    EXPECT_EQ(status_of("GET", job + "/0/0", 0), 404u) << job;
    EXPECT_EQ(status_of("POST", job + "/0/0", 64), 404u) << job;
  }
  EXPECT_EQ(status_of("POST", "1/0/0", kCopyPieceBytes + 1), 413u);
  EXPECT_EQ(status_of("GET", "1/0", 0), 404u);
  EXPECT_EQ(status_of("DELETE", "1/0/0", 0), 405u);
  ASSERT_TRUE(training.goes_on(20));
  training.end();
  training.check();
}

TEST_P(ShardsTest, AShardIsReadyWhileItServesUnderAServer) {
  auto server = std::make_unique<ServerProcess>(PHUB_BINARY, kShortShardLease);
  ShardProcess shard(PHUB_BINARY, server->address());
  EXPECT_TRUE(becomes([&] { return shard.answers("/readyz") == 200; })) << shard.output();
  EXPECT_EQ(shard.answers("/healthz"), 200u);
  EXPECT_EQ(shard.answers("/v1/status"), 404u) << "jobs are the server's";
  EXPECT_EQ(server->end(SIGTERM), 0);
  EXPECT_TRUE(becomes([&] { return shard.answers("/readyz") == 503; })) << shard.output();
  EXPECT_EQ(shard.answers("/healthz"), 200u);
  const ServerProcess next(PHUB_BINARY, {}, server->address());
  EXPECT_TRUE(becomes([&] { return shard.answers("/readyz") == 200; })) << shard.output();
}

// The first rank may choose; the second follows the job, as "auto" does where it is there.
TEST_P(ShardsTest, AutoIsMemoryToTheBoxesOfThisHost) {
  start_shard();
  ASSERT_TRUE(becomes_of(1));
  JobSpec near = spec("near");
  near.initial = "zeros";
  const WorkerOptions options = options_of(server_.address(), near);
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions mine = options;
    mine.rank = static_cast<int32_t>(rank);
    mine.transport = rank == 0 ? GetParam() : "auto";
    Worker worker(mine);
    const bool over_memory =
        worker.connection().find("over memory of this host; 0 connections") != std::string::npos;
    EXPECT_EQ(over_memory, mine.transport == "auto") << worker.connection();
    for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
    worker.wait_all();  // a rank that left before the job has begun would end the job
    worker.leave();
  });
}

// The server decides for all boxes what becomes of a round. (That the bits are those of one box:
// ctest's shards/worker/gated_test.)
TEST_P(ShardsTest, AJobWithGatedRoundsHasAPartAtEveryBox) {
  start_shard();
  ASSERT_TRUE(becomes_of(1));
  JobSpec gated = spec("gated");
  gated.hyper["max_norm"] = 1;
  gated.initial = "zeros";
  WorkerOptions options = options_of(server_.address(), gated);
  options.transport = GetParam();
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions mine = options;
    mine.rank = static_cast<int32_t>(rank);
    Worker worker(mine);
    for (uint64_t round = 1; round <= 20; ++round) {
      for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
      worker.wait_all();
      EXPECT_EQ(worker.verdict()->round, round);
    }
    if (rank == 0) {
      EXPECT_TRUE(becomes([&] {  // as the probes say it
        const std::vector<uint64_t> all = arrivals("gated");
        return all.size() == 2 && all[0] > 0 && all[1] > 0;
      }));
    }
    worker.leave();
  });
}

// What it has of the job fits, and half of its state beside that does not.
TEST_P(ShardsTest, AShardWithoutRoomForTheStateOfKeysSaysSo) {
  start_shard({"--memory-limit", "11M"});
  ASSERT_TRUE(becomes_of(1));
  JobSpec large = spec("large");
  large.keys = {{.name = "w", .elements = 1'000'000}, {.name = "b", .elements = 100}};
  large.chunk_elements = 8192;
  large.world_size = large.max_ranks = 1;
  large.initial = "zeros";
  WorkerOptions options = options_of(server_.address(), large);
  options.transport = GetParam();
  Worker worker(options);
  ASSERT_TRUE(becomes([&] { return arrivals("large").size() == 2; }));
  std::vector<float> memory(3'000'000);
  const std::span<float> all(memory);
  const auto state_of = [&](size_t key) {
    const size_t elements = large.keys[key].elements;
    return KeyState{.key = key,
                    .arrays = {all.first(elements), all.subspan(elements, elements),
                               all.subspan(2 * elements, elements)}};
  };
  KeyState whole = state_of(0), small = state_of(1);
  for (uint64_t round = 1; round <= 2; ++round) {
    for (size_t key = 0; key < 2; ++key) {
      std::ranges::fill(worker.gradient(key), 1);
      worker.push(key);
    }
    worker.wait_all();
    expect_error(ErrorCode::kFull, "for which the box has no room now", [&] {
      worker.get_state({&whole, 1});
    });
    expect_error(ErrorCode::kFull, "for which the box has no room now", [&] {
      worker.set_state({&whole, 1});
    });
    EXPECT_EQ(worker.get_state({&small, 1}), round);
    EXPECT_EQ(small.arrays[0][99], worker.parameters(1)[99]);
    EXPECT_EQ(small.step, round);
  }
  worker.leave();
}

const auto name_of = [](const auto& instance) { return std::string(instance.param); };
INSTANTIATE_TEST_SUITE_P(Every, ShardsTest, ::testing::Values("tcp", "auto"), name_of);
INSTANTIATE_TEST_SUITE_P(Every, ShardsWithALongLease, ::testing::Values("tcp"), name_of);

}  // namespace shards_test
}  // namespace phub::testing
