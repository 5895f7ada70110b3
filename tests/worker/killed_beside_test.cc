// Branches that are killed beside what else a job may have: ranks that save state of their own, and
// shards that have no room.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/worker/branch_rounds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/killed_branches.h"
#include "worker/worker.h"

namespace phub::testing {
namespace killed_beside_test {

// A kill goes to files with the next checkpoint that the ranks know, which has their parts.
class KilledBesideSavers : public ::testing::TestWithParam<size_t> {
 protected:
  static constexpr uint64_t kEvery = 5;
  void begin() {
    workers_ = join(*server_, spec_of("savers", 2), server_.transport(), [](uint64_t round) {
      return RankState{{"round", std::vector(1, static_cast<std::byte>(round))}};
    });
  }
  Worker& worker() { return *workers_[0]; }
  // What branch 1 has when it runs before `round`.
  Model run_it(const Workers& workers, uint64_t round, uint64_t at) {
    const BranchTurn turns[] = {{1, 1}, {0, 0}};
    EXPECT_EQ(workers[0]->schedule(turns, at), at);
    train(workers, round, at - 1, seen_);
    Model model = model_of(*workers[0]);
    train(workers, at, at, seen_);
    return model;
  }

  SavingServer server_{PHUB_BINARY, GetParam(), 3, {}, kEvery};
  Workers workers_;
  SeenRounds seen_;
};

TEST_P(KilledBesideSavers, LieWithTheirPartsAndComeBack) {
  begin();
  worker().fork(0, {{"lr", 0.25}}, 3);
  const Model first = run_it(workers_, 1, 4);
  EXPECT_EQ(worker().kill(1, 7), 7u);
  uint64_t round = 4;
  const auto is_on_disk = [&] {
    ++round;
    train(workers_, round, round, seen_);
    return status_of(worker(), 1).on_disk;
  };
  ASSERT_TRUE(becomes(is_on_disk));
  server_.kill();
  workers_.clear();
  server_.start();
  begin();
  const uint64_t saved = worker().first_round() - 1;
  EXPECT_EQ(saved % kEvery, 0u);
  EXPECT_GE(saved, 6u);
  for (const auto& one : workers_) {
    const auto state = one->restored("round");
    ASSERT_TRUE(state.has_value());
    EXPECT_EQ(state->front(), static_cast<std::byte>(saved));
  }
  ASSERT_TRUE(status_of(worker(), 1).on_disk);
  EXPECT_EQ(worker().revive(1, saved + 3), saved + 3);
  const Model again = run_it(workers_, saved + 1, saved + 4);
  const Workers never = join(*server_, spec_of("never", 2), server_.transport());
  never[0]->fork(0, {{"lr", 0.25}}, 3);
  EXPECT_TRUE(run_it(never, 1, 4) == first);
  EXPECT_TRUE(run_it(never, 5, saved + 4) == again);
}

// The part that a shard has of the job fits, and that of one more branch does not.
TEST(KilledBranchesOfShards, StayKilledWhereAShardHasNoRoom) {
  SavingServer server(PHUB_BINARY, 1, 3, {"--memory-limit", "17M"});
  JobSpec spec = spec_of("large");
  spec.keys = {{.name = "w", .elements = 660'000}};
  spec.chunk_elements = 8192;
  const Workers workers = join(*server, spec, "tcp");
  Worker& worker = *workers[0];
  SeenRounds seen;
  worker.fork(0);
  train(workers, 1, 4, seen);
  worker.kill(1);
  train(workers, 5, 6, seen);
  await_on_disk(worker, 1);
  expect_error(ErrorCode::kFull, "for which the box has no room now: raise --memory-limit",
               [&] { worker.revive(1); });
  EXPECT_TRUE(status_of(worker, 1).on_disk);
  expect_error(ErrorCode::kFull, "cannot be revived", [&] { worker.revive(1); });
  train(workers, 7, 8, seen);
}

INSTANTIATE_TEST_SUITE_P(Every, KilledBesideSavers, ::testing::Values(0, 2), name_of_shards);

}  // namespace killed_beside_test
}  // namespace phub::testing
