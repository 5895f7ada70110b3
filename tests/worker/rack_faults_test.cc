// Boxes below a parent, as processes that are killed and come back, with workers that are: what
// every worker saw is what the root's log and those of the racks say together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "tests/worker/fault_oracle.h"
#include "tests/worker/process.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"

namespace phub::testing {
namespace rack_faults_test {

using ::testing::HasSubstr;

constexpr uint32_t kRanks = 4, kOfRack = 2;

// Two racks of two ranks below a root.
class RackFaults : public ::testing::Test {
 protected:
  RackFaults() {
    for (uint32_t rack = 0; rack < kRanks / kOfRack; ++rack) start_rack(rack);
  }
  void start_rack(uint32_t rack) {
    racks_.resize(std::max<size_t>(racks_.size(), rack + 1));
    racks_[rack] = std::make_unique<ServerProcess>(PHUB_BINARY, Flags{"--parent", root_.address()});
  }
  static JobSpec spec(const std::string& name, const std::string& on_loss) {
    JobSpec spec = fault_spec(name, kRanks, "adam");
    spec.groups = "2,2";
    spec.lease_ms = 3000;
    spec.reduction = "mean";
    spec.on_loss = on_loss;
    return spec;
  }
  Process& start(Training& training, uint32_t rank, const Flags& flags = {}) {
    return training.start_at(racks_[rank / kOfRack]->address(), static_cast<int32_t>(rank), flags);
  }
  void start_all(Training& training) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) start(training, rank);
  }
  std::vector<LogRecord> log_of(uint32_t rack, const std::string& job) const {
    return ControlClient(racks_[rack]->address()).log(job);
  }

  const ServerProcess root_{PHUB_BINARY};
  std::vector<std::unique_ptr<ServerProcess>> racks_;
};

// What the logs of all boxes say of the training's ranks. `lives`: of a rack each; when the root
// lost it, those of its ranks that were there took part as it did.
std::vector<LogRecord> merged(const std::vector<LogRecord>& root,
                              const std::vector<std::vector<LogRecord>>& lives) {
  std::vector<LogRecord> all;
  for (const std::vector<LogRecord>& life : lives) {
    const uint32_t rack = life.front().rank / kOfRack;
    const uint32_t before = life.front().incarnation - 1;  // incarnations
    all.insert(all.end(), life.begin(), life.end());
    for (const LogRecord& record : root) {
      const bool lost = record.kind == LogRecord::Kind::kLost && record.rank == rack &&
                        (record.incarnation - 1) * 1024 == before;
      for (uint32_t rank = rack * kOfRack; lost && rank < (rack + 1) * kOfRack; ++rank) {
        all.push_back(record);
        all.back().rank = rank;
        all.back().incarnation = before + 1;
      }
    }
  }
  return all;
}

TEST_F(RackFaults, ARackThatIsKilledAndComesBack) {
  Training training(root_.address(), spec("rack", "shrink"));
  start_all(training);
  ASSERT_TRUE(training.goes_on(20));
  const std::vector<LogRecord> first_life = log_of(1, "rack");
  racks_[1]->end(SIGKILL);
  EXPECT_TRUE(becomes([&] { return training.rank(1).state == "lost"; }));
  ASSERT_TRUE(training.goes_on(20));
  start_rack(1);
  start(training, 2);
  start(training, 3);
  EXPECT_TRUE(becomes([&] { return training.rank(1).state == "live"; }));
  EXPECT_EQ(training.rank(1).incarnation, 2u);
  ASSERT_TRUE(training.goes_on(20));
  training.end();
  training.check(merged(training.log(), {log_of(0, "rack"), first_life, log_of(1, "rack")}));
}

TEST_F(RackFaults, TheRootsPolicyFailsTheJobForALostRack) {
  Training training(root_.address(), spec("fail", "fail"));
  Process& worker = start(training, 0);
  for (uint32_t rank = 1; rank < kRanks; ++rank) start(training, rank);
  ASSERT_TRUE(training.goes_on(10));
  racks_[1]->end(SIGKILL);
  ASSERT_TRUE(worker.wait(kLong).has_value());
  EXPECT_THAT(worker.output(), HasSubstr("rank 1 (incarnation 1) was lost in round"));
  EXPECT_THAT(worker.output(), HasSubstr("the parent at " + root_.address()));
  training.end();
}

// A rank that is lost fails its rack, and that the root's job, for the same reason.
TEST_F(RackFaults, ThePolicyFailNamesTheRankOfARack) {
  Training training(root_.address(), spec("named", "fail"));
  Process& worker = start(training, 0);
  start(training, 1);
  start(training, 2);
  start(training, 3, {"--die-in", "20"});
  ASSERT_TRUE(worker.wait(kLong).has_value());
  EXPECT_THAT(worker.output(), HasSubstr("rank 3 (incarnation 1) was lost in round"));
  training.end();
}

TEST_F(RackFaults, TheRootsDeathEndsTheRacksJobs) {
  auto root = std::make_unique<ServerProcess>(PHUB_BINARY);
  const ServerProcess rack(PHUB_BINARY, {"--parent", root->address()});
  JobSpec alone = spec("root", "shrink");
  alone.world_size = alone.max_ranks = 2;
  alone.groups = "2";
  Training training(root->address(), alone);
  Process& worker = training.start_at(rack.address(), 0);
  training.start_at(rack.address(), 1);
  ASSERT_TRUE(training.goes_on(10));
  const std::string address = root->address();
  root->end(SIGKILL);
  ASSERT_TRUE(worker.wait(kLong).has_value());
  EXPECT_THAT(worker.output(), HasSubstr("the parent at " + address));
  EXPECT_TRUE(becomes([&] { return ControlClient(rack.address()).status().jobs.empty(); }));
  training.end();
}

// Workers below racks come back as those of the root itself would.
TEST_F(RackFaults, ARootThatSavesItsJobsIsKilledAndGoesOn) {
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  const Flags saves = {"--checkpoints", folder.path() + "/checkpoints", "--checkpoint-every", "5"};
  auto root = std::make_unique<ServerProcess>(PHUB_BINARY, saves);
  const std::string address = root->address();
  for (auto& rack : racks_) {
    rack = std::make_unique<ServerProcess>(PHUB_BINARY, Flags{"--parent", address});
  }
  Training training(address, spec("saved", "shrink"));
  for (uint32_t rank = 0; rank < kRanks; ++rank) start(training, rank, {"--rejoin"});
  ASSERT_TRUE(training.goes_on(20));
  ASSERT_TRUE(becomes([&] { return training.status().durable_round >= 10; }));
  const std::vector<LogRecord> first[] = {log_of(0, "saved"), log_of(1, "saved")};
  root->end(SIGKILL);
  training.end_lives();
  root = std::make_unique<ServerProcess>(PHUB_BINARY, saves, address);
  ASSERT_TRUE(becomes([&] { return training.round() > 0; }));
  ASSERT_TRUE(training.goes_on(20));
  training.end();
  training.check(
      merged(training.log(), {first[0], first[1], log_of(0, "saved"), log_of(1, "saved")}));
}

// Where the root saves the job, workers of a rack join it again by themselves.
TEST_F(RackFaults, WorkersOfARackThatIsStartedAgainJoinIt) {
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  const ServerProcess root(PHUB_BINARY, {"--checkpoints", folder.path() + "/checkpoints"});
  for (auto& rack : racks_) {
    rack = std::make_unique<ServerProcess>(PHUB_BINARY, Flags{"--parent", root.address()});
  }
  Training training(root.address(), spec("again", "shrink"));
  for (uint32_t rank = 0; rank < kRanks; ++rank) start(training, rank, {"--rejoin"});
  ASSERT_TRUE(training.goes_on(20));
  const std::vector<LogRecord> first_life = log_of(1, "again");
  const std::string address = racks_[1]->address();
  racks_[1]->end(SIGKILL);
  EXPECT_TRUE(becomes([&] { return training.rank(1).state == "lost"; }));
  ASSERT_TRUE(training.goes_on(20));
  racks_[1] =
      std::make_unique<ServerProcess>(PHUB_BINARY, Flags{"--parent", root.address()}, address);
  EXPECT_TRUE(becomes([&] {
    const RankStatus rack = training.rank(1);
    return rack.incarnation == 2 && rack.rack_live == std::vector<uint32_t>{2, 3};
  }));
  ASSERT_TRUE(training.goes_on(20));
  training.end();
  training.check(merged(training.log(), {log_of(0, "again"), first_life, log_of(1, "again")}));
}

}  // namespace rack_faults_test
}  // namespace phub::testing
