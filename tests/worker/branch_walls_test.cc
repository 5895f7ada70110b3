// Branches of jobs that are not in lock-step, on a whole box, with ranks that are slow: a fork is a
// wall, a rank may be ahead by the branch's own slack, and who waits in one branch goes on with
// another.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace branch_walls_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;

constexpr uint32_t kRanks = 3;
constexpr uint64_t kRounds = 22, kSlack = 3;

JobSpec spec_of(const std::string& consistency) {
  JobSpec spec;
  spec.name = "walls-" + consistency;
  spec.keys = {{.name = "a", .elements = 1000}, {.name = "b", .elements = 7}};
  spec.world_size = kRanks;
  spec.chunk_elements = 96;
  spec.consistency = consistency;
  spec.slack = consistency == "ssp" ? kSlack : 0;
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 1}};
  spec.branches = 1;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// Every update of rank r takes 64^r: a parameter says how many of each it has.
uint64_t weight(uint32_t rank) { return uint64_t{1} << (6 * rank); }

void push_all(Worker& worker) {
  for (size_t key = 0; key < worker.keys(); ++key) {
    std::ranges::fill(worker.gradient(key), static_cast<float>(weight(worker.rank())));
    worker.push(key);
  }
  worker.wait_all();
}

struct Stretch {
  uint64_t first = 1, before = 0;  // its first round; rounds that its branch has behind it
  uint64_t slack = kSlack;
};

// Branch 1 is forked before round 4, and runs in rounds 5 to 10 and from 17 on.
std::vector<Stretch> stretches_of(uint64_t slack) {
  return {{1, 0, slack}, {4, 3, slack}, {5, 3, 0}, {11, 4, slack}, {17, 9, 0}};
}

class Observer {
 public:
  explicit Observer(uint64_t slack) : stretches_(stretches_of(slack)) {}

  // After the rank's `round`.
  void look(const Worker& worker, uint64_t round) {
    auto next = std::ranges::upper_bound(stretches_, round + 1, {}, &Stretch::first);
    const Stretch& now = *std::prev(next);
    const uint64_t most = next == stretches_.end() ? kRounds : next->first - 1;
    for (size_t key = 0; key < worker.keys(); ++key) {
      for (const float parameter : worker.parameters(key)) {
        auto left = static_cast<uint64_t>(-parameter);
        for (uint32_t rank = 0; rank < kRanks; ++rank, left >>= 6) {
          const uint64_t count = (left & 63) + now.first - 1 - now.before;  // of the job's rounds
          if (rank == worker.rank()) ASSERT_EQ(count, round);
          ASSERT_GE(count + now.slack, round) << "rank " << rank << " in round " << round;
          ASSERT_LE(count, most) << "rank " << rank << " in round " << round;
          farthest_ = std::max(farthest_, round - std::min(count, round));
        }
        ASSERT_EQ(left, 0u);
      }
    }
  }
  uint64_t farthest() const { return farthest_; }  // ahead of another

 private:
  const std::vector<Stretch> stretches_;
  uint64_t farthest_ = 0;
};

void train(const std::string& consistency) {
  SCOPED_TRACE(consistency);
  Box box(2);
  const JobSpec spec = spec_of(consistency);
  std::vector<Observer> observers(kRanks, Observer(consistency == "ssp" ? kSlack : kRounds));
  each_rank(kRanks, [&](uint32_t r) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(r);
    Worker worker(options);
    worker.wait_all();
    if (r == 0) {
      EXPECT_EQ(worker.fork(0, {{"slack", 0}}, 4).round, 4u);
      const BranchTurn turns[] = {{1, 6}, {0, 6}, {1, 0}};
      EXPECT_EQ(worker.schedule(turns, 5), 5u);
    }
    worker.barrier();
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(4));
      push_all(worker);
      observers[r].look(worker, round);
      EXPECT_EQ(worker.branch_in(round + 1), round + 1 < 5 || (round > 9 && round < 16) ? 0u : 1u);
    }
    worker.barrier();
  });
  EXPECT_GT(observers[0].farthest(), 0u) << "nobody was ahead of the slow rank";
}

TEST(BranchWalls, AllChangeOverInTheSameRoundWithTheSameUpdates) {
  train("ssp");
  train("async");
}

// Rank 2 makes no round before rank 0 has the result of its own, which is that of another branch.
TEST(BranchWalls, WhoWaitsInOneBranchGoesOnWithAnother) {
  constexpr uint64_t kFirst = 6, kLast = 20;  // rounds in which the branches change
  Box box(2);
  JobSpec spec = spec_of("ssp");
  spec.slack = 0;
  std::atomic<uint64_t> has_result = 0;
  each_rank(kRanks, [&](uint32_t r) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(r);
    Worker worker(options);
    worker.wait_all();
    if (r == 0) {
      worker.fork(0, {}, 4);
      std::vector<BranchTurn> turns;
      for (uint64_t round = kFirst; round <= kLast; ++round) {
        turns.push_back(
            {.branch = static_cast<uint32_t>(round % 2), .rounds = round < kLast ? 1u : 0u});
      }
      worker.schedule(turns, kFirst);
    }
    worker.barrier();
    for (uint64_t round = 1; round < kLast; ++round) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (r == 2 && round >= kFirst && has_result < round) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "round " << round;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      push_all(worker);
      if (r == 0) has_result = round;
      // Of each rank it has all updates of the rounds before; 3, 4 and 5 are of branch 0.
      const uint64_t next = round + 1;
      const uint64_t made = next <= kFirst ? round : (next % 2 == 0 ? 5 : 3) + (next - kFirst) / 2;
      for (const float parameter : worker.parameters(0)) {
        auto left = static_cast<uint64_t>(-parameter);
        for (uint32_t rank = 0; rank < kRanks; ++rank, left >>= 6) ASSERT_GE(left & 63, made);
      }
    }
    worker.barrier();
  });
}

TEST(BranchWalls, WhoHasLeftIsNotWaitedFor) {
  Box box(2);
  JobSpec spec = spec_of("async");
  spec.world_size = 2;
  each_rank(2, [&](uint32_t r) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(r);
    Worker worker(options);
    worker.wait_all();
    if (r == 0) worker.fork(0, {}, 4);
    worker.barrier();
    for (uint64_t round = 1; round <= (r == 0 ? 6u : 2u); ++round) push_all(worker);
    if (r == 1) return worker.leave();
    EXPECT_EQ(worker.branches().branches.size(), 2u);
  });
}

TEST(BranchWalls, ASlackThatTheJobDoesNotHaveIsRefused) {
  Box box(1);
  JobSpec spec = spec_of("ssp");
  spec.world_size = 1;
  Worker worker(box.options(spec));
  worker.wait_all();
  expect_error(ErrorCode::kInvalid, "must be from 0 to 3", [&] { worker.fork(0, {{"slack", 4}}); });
  expect_error(ErrorCode::kInvalid, "a whole number of rounds, got 1.5", [&] {
    worker.fork(0, {{"slack", 1.5}});
  });
  expect_error(ErrorCode::kInvalid, "same for all groups", [&] {
    worker.fork(0, {{"slack@0", 1}});
  });
  EXPECT_EQ(worker.fork(0, {{"slack", 3}}).branch, 1u);
}

}  // namespace branch_walls_test
}  // namespace phub
