// Jobs over a network whose ranks choose "auto" on the box's host: they exchange over memory, the
// others over the network, and all get the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "phub/rack/parent_client.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "transport/control/control_client.h"
#include "transport/error.h"
#include "worker/session/session.h"

namespace phub::testing {
namespace beside_test {

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
  // The first rank names the transport; "auto" follows the job where it is there.
  std::vector<std::unique_ptr<Worker>> join(const JobSpec& spec) {
    std::vector<std::unique_ptr<Worker>> workers;
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      WorkerOptions options = box_->options(spec, rank);
      options.transport = rank == 0 ? "ofi" : "auto";
      options.await_ranks = false;
      workers.push_back(std::make_unique<Worker>(options));
    }
    return workers;
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
  const auto workers = join(job);
  each_rank(kRanks, [&](uint32_t rank) {
    Worker* const worker = workers[rank].get();
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

// So do racks: the first one names the network, and another one on the host of the root, or of a
// box under it, has memory beside it.
TEST_F(BesideTest, ARackOfTheRootsHostSendsOverMemoryAndOthersOverTheNetwork) {
  Box far("pack:1 core:2 pu:1", uint64_t{1} << 33, {}, {}, box_->address(), nullptr,
          {.transport = "ofi"});
  Box near("pack:1 core:2 pu:1", uint64_t{1} << 33, {}, {}, box_->address(), nullptr,
           {.transport = "auto"});
  JobSpec job = spec("racks", 2);
  job.groups = "1,1";
  std::vector<std::unique_ptr<Worker>> workers;
  for (Box* const box : {&far, &near}) {
    WorkerOptions options = box->options(job);
    options.rank = static_cast<int32_t>(workers.size());
    options.transport = "tcp";
    options.await_ranks = false;
    workers.push_back(std::make_unique<Worker>(options));
  }
  EXPECT_EQ(box_->status().jobs.at(0).transport, "ofi");
  constexpr uint64_t kRounds = 30;
  each_rank(2, [&](uint32_t rank) {
    Worker& worker = *workers[rank];
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t key = 0; key < 2; ++key) {
        const std::span<float> gradient = worker.gradient(key);
        for (size_t i = 0; i < gradient.size(); ++i) {
          gradient[i] = static_cast<float>(1000 * rank + round + key + i % 100);
        }
        worker.push(key);
      }
      for (size_t key = 0; key < 2; ++key) {
        worker.wait(key);
        const std::span<const float> sums = worker.parameters(key);
        for (size_t i = 0; i < job.keys[key].elements; ++i) {
          ASSERT_EQ(sums[i], static_cast<float>(1000 + 2 * (round + key + i % 100)))
              << "round " << round << ", key " << key << ", element " << i;
        }
      }
    }
    worker.barrier();
    worker.leave();
  });
}

TEST_F(BesideTest, AnUplinkHasMemoryBesideItWhereItMayChoose) {
  JobSpec job = spec("uplinks", 2);
  job.rack_ranks = {1, 1};
  std::vector<std::unique_ptr<ParentClient>> racks;
  std::vector<JoinReply> replies;
  std::vector<std::unique_ptr<WorkerLink>> links;
  for (const char* transport : {"ofi", "auto"}) {
    const auto rank = static_cast<int32_t>(racks.size());
    racks.push_back(std::make_unique<ParentClient>(
        ParentClient::Options{.server = box_->address(), .transport = transport}));
    replies.push_back(join_parent(
        *racks.back(), {.spec = job, .rank = rank, .transport = transport, .id = transport}));
    EXPECT_EQ(replies.back().offer.transport, "ofi");
    links.push_back(racks.back()->connect(replies.back().offer, link_layout_of(replies.back())));
  }
  EXPECT_THAT(links[0]->describe(), Not(HasSubstr("over memory")));
  EXPECT_THAT(links[1]->describe(), HasSubstr("over memory of this host; 0 queue pairs"));
  for (const JoinReply& reply : replies) {
    ControlClient(box_->address())
        .leave({job.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch});
  }
}

// A rank that ends without a word is lost, and one that comes in its place goes on, near or not.
TEST_F(BesideTest, ARankThatIsReplacedIsReportedOnce) {
  const JobSpec job = spec("replaced", 2);
  auto workers = join(job);
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
  EXPECT_EQ(workers[1]->incarnation(), 5u) << "nobody else was lost";
  each_rank(2, [&](uint32_t rank) { workers[rank]->leave(); });
}

}  // namespace beside_test
}  // namespace phub::testing
