// Branches that were revived for a later round when their server died: the job goes on, and what
// they have lies beside the shelves until that round; what other boxes have of it lies at the
// server until they have fetched it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/expect_error.h"
#include "tests/worker/killed_branches.h"

namespace phub::testing {
namespace docked_branches_test {

constexpr uint64_t kAhead = 9;  // rounds

class DockedBranches : public ::testing::TestWithParam<size_t> {
 protected:
  static JobSpec spec() {
    JobSpec spec = spec_of("docked");
    spec.keys.front().elements = 400'000;
    spec.chunk_elements = 8192;
    return spec;
  }
  // Of all boxes: the parameters and the momentum.
  static uint64_t branch_bytes() {
    uint64_t elements = 0;
    for (const KeySpec& key : spec().keys) elements += key.elements;
    return 2 * elements * sizeof(float);
  }

  void begin() {
    workers_ = join(*server_, spec(), server_.transport());
    worker().fork(0);
    run_some(2);
    worker().kill(1);
    run_some(2);
    await_on_disk(worker(), 1);
    EXPECT_EQ(boxes(), 1 + GetParam());
  }
  // The server dies meanwhile.
  void revive_later() {
    revived_ = round_ + kAhead;
    EXPECT_EQ(worker().revive(1, revived_), revived_);
    run_some(1);
    save(worker());
    server_.kill();
    workers_.clear();  // else they leave, and the job has ended
  }
  void go_on() {
    workers_ = join(*server_, spec(), server_.transport());
    round_ = worker().first_round() - 1;
  }
  // It is what it was forked from.
  void check_revived() {
    run_some(revived_ - round_);
    EXPECT_EQ(status_of(worker(), 1).killed, 0u);
    const BranchTurn turns[] = {{1, 0}};
    const uint64_t at = worker().schedule(turns);
    run_some(at - round_ - 1);
    EXPECT_TRUE(model_of(worker()) == forked_);
  }

  void run_some(uint64_t rounds) {
    for (; rounds > 0; --rounds) {
      ++round_;
      push(worker(), round_, worker().branch_in(round_));
      if (round_ + 1 == status_of(worker(), 1).round) forked_ = model_of(worker());
    }
  }
  uint64_t memory() const { return server_.status().memory_bytes; }
  size_t boxes() const {
    std::set<uint32_t> boxes;
    for (const JobStatus& job : server_.status().jobs) {
      for (const JobCoreStatus& core : job.cores) boxes.insert(core.box);
    }
    return boxes.size();
  }
  Worker& worker() { return *workers_[0]; }

  SavingServer server_{PHUB_BINARY, GetParam()};
  Workers workers_;
  uint64_t round_ = 0, revived_ = 0;
  Model forked_;
};

TEST_P(DockedBranches, AreInTheBudgetBeforeTheJobIsMade) {
  begin();
  const uint64_t without = memory(), half = branch_bytes() / 2;
  revive_later();
  const auto start = [this](uint64_t limit) {
    server_.start("pack:1 core:2 pu:1", {"--memory-limit", std::to_string(limit)});
  };
  start(without + half);
  expect_error(ErrorCode::kFull, "job 'docked' needs", [this] { go_on(); });
  server_.kill();
  start(without + 3 * half);
  go_on();
  EXPECT_EQ(boxes(), 1 + GetParam());
  const uint64_t here = branch_bytes() / boxes();
  EXPECT_GT(memory(), without + here / 2);
  EXPECT_LT(memory(), without + here + here / 2) << "other boxes have theirs";
  check_revived();
  EXPECT_TRUE(becomes([&] { return memory() < without + here / 2; }));
}

// What the others have made is dropped, and the job is made over those that are left.
TEST_P(DockedBranches, ComeThoughABoxDiesWhileTheJobIsMade) {
  if (GetParam() == 0) GTEST_SKIP() << "there is no shard";
  begin();
  revive_later();
  server_.start();
  server_.stop_shard(1);
  std::future<void> joined = std::async(std::launch::async, [this] { go_on(); });
  ASSERT_TRUE(becomes([&] { return memory() > 0; }));
  EXPECT_EQ(boxes(), 0u) << "it is being made";
  server_.kill_shard(1);
  joined.get();
  EXPECT_EQ(boxes(), GetParam());
  check_revived();
  worker().leave();
  workers_.clear();
  EXPECT_TRUE(becomes([&] { return memory() == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Every, DockedBranches, ::testing::Values(0, 2), name_of_shards);

}  // namespace docked_branches_test
}  // namespace phub::testing
