// Jobs over a network whose ranks choose "auto" on the box's host: they exchange over memory, the
// others over the network, and all get the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "transport/error.h"

namespace phub::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class BesideTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const transport = std::getenv("PHUB_TRANSPORT");
    if (transport == nullptr || std::string(transport) != "ofi") {
      GTEST_SKIP() << "needs PHUB_TRANSPORT=ofi";
    }
    box_ = std::make_unique<Box>();
  }
  JobSpec spec(const std::string& name, uint32_t ranks) const {
    JobSpec spec;
    spec.name = name;
    spec.keys = {{.name = "a", .elements = 5000}, {.name = "b", .elements = 33'000}};
    spec.world_size = ranks;
    spec.optimizer = "none";
    spec.reduction = "sum";
    spec.chunk_elements = 1024;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    return spec;
  }
  std::unique_ptr<Worker> join(const JobSpec& spec, uint32_t rank, const char* transport) {
    WorkerOptions options = box_->options(spec);
    options.rank = static_cast<int32_t>(rank);
    options.transport = transport;
    return std::make_unique<Worker>(options);
  }

  std::unique_ptr<Box> box_;
};

TEST_F(BesideTest, RanksOfTheBoxesHostExchangeOverMemoryAndOthersOverTheNetwork) {
  const auto seed = static_cast<uint32_t>(fresh_seeds(1).first);
  SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed);
  constexpr uint32_t kRanks = 3, kRounds = 30;
  const JobSpec job = spec("beside", kRanks);
  const auto value = [seed](uint32_t rank, uint64_t round, size_t key, size_t i) {
    return static_cast<float>((seed + 31 * rank + 7 * round + 3 * key + i) % 1000);
  };
  each_rank(kRanks, [&](uint32_t rank) {
    // The first rank to come names the transport; "auto" follows the job where it is there.
    auto worker = join(job, rank, rank == 0 ? "ofi" : "auto");
    EXPECT_THAT(worker->connection(), HasSubstr("ofi: "));
    if (rank == 0) {
      EXPECT_THAT(worker->connection(), Not(HasSubstr("over memory")));
    } else {
      EXPECT_THAT(worker->connection(), HasSubstr("over memory of this host; 0 queue pairs"));
    }
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t key = 0; key < 2; ++key) {
        const std::span<float> gradient = worker->gradient(key);
        for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = value(rank, round, key, i);
        worker->push(key);
      }
      for (size_t key = 0; key < 2; ++key) {
        worker->wait(key);
        const std::span<const float> sums = worker->parameters(key);
        for (size_t i = 0; i < job.keys[key].elements; ++i) {
          float sum = value(0, round, key, i);
          for (uint32_t r = 1; r < kRanks; ++r) sum += value(r, round, key, i);
          ASSERT_EQ(sums[i], sum) << "round " << round << ", key " << key << ", element " << i;
        }
      }
    }
    worker->barrier();
    worker->leave();
  });
}

// A rank that ends without a word is lost, and one that comes in its place goes on, near or not.
TEST_F(BesideTest, ARankThatIsReplacedIsReportedOnce) {
  const JobSpec job = spec("replaced", 2);
  std::unique_ptr<Worker> workers[2];
  each_rank(2, [&](uint32_t rank) { workers[rank] = join(job, rank, rank == 0 ? "ofi" : "auto"); });
  const auto round = [&] {
    for (const auto& worker : workers) {
      for (size_t key = 0; key < 2; ++key) worker->push(key);
    }
    for (const auto& worker : workers) worker->wait_all();
  };
  round();
  for (const char* transport : {"ofi", "auto", "auto", "ofi"}) {
    WorkerOptions options = box_->options(job);
    options.rank = 1;
    options.replace = true;
    options.transport = transport;
    workers[1] = std::make_unique<Worker>(options);
    round();
  }
  const auto log = box_->log("replaced");
  EXPECT_EQ(workers[1]->incarnation(), 6u) << log.size();
  each_rank(2, [&](uint32_t rank) { workers[rank]->leave(); });
}

}  // namespace
}  // namespace phub::testing
