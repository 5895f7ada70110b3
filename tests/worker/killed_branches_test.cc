// Branches of saved jobs, of which one is killed and revived: to the bit what it would be if
// neither it nor its box had ever been killed, with keys of every kind (rack_sim: any decisions, in
// any order); and what becomes of its files. In one box, and in three of which two are shards.
#include "tests/worker/killed_branches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/worker/box.h"
#include "tests/worker/branch_rounds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/training.h"
#include "worker/worker.h"

namespace phub::testing {
namespace killed_branches_test {

namespace fs = std::filesystem;

// Dense keys, and matrices whose factors or rows are sent.
JobSpec spec_of_all_kinds(const std::string& name, uint32_t branches = kShelves) {
  JobSpec spec = spec_of(name, 1, branches);
  for (const char* key : {"factors", "rows", "lazy"}) {
    spec.keys.push_back({.name = key, .elements = uint64_t{150} * 20, .shape = {150, 20}});
  }
  EXPECT_EQ(set_factors(spec, "factors", 3), 1u);
  EXPECT_EQ(set_rows(spec, "rows", 9, false), 1u);
  EXPECT_EQ(set_rows(spec, "lazy", 9, true), 1u);
  return spec;
}

uint32_t tile_rows_of(const Worker& worker) {
  return worker.spec().keys[worker.key("factors")].tile_rows;
}

class OneKilled : public ::testing::TestWithParam<size_t> {
 protected:
  // Branch 1 has made a round of its own, and lies on its shelf from round 6 on.
  void begin(const std::string& job = "one") {
    workers_ = join(*server_, spec_of_all_kinds(job), server_.transport());
    worker().fork(0, {{"lr", 0.25}}, 3);
    const BranchTurn turns[] = {{1, 2}, {0, 0}};
    worker().schedule(turns, 4);
    train(workers_, 1, 6, seen_);
    round_ = 6;
    EXPECT_EQ(boxes_of(job), 1 + GetParam());
  }
  size_t boxes_of(const std::string& job) const {
    std::set<uint32_t> boxes;
    for (const JobStatus& one : server_.status().jobs) {
      if (one.name != job) continue;
      for (const JobCoreStatus& core : one.cores) boxes.insert(core.box);
    }
    return boxes.size();
  }
  void run_some(uint64_t rounds = 2) {
    train(workers_, round_ + 1, round_ + rounds, seen_);
    round_ += rounds;
  }
  void kill_on_disk() {
    worker().kill(1);
    run_some();
    await_on_disk(worker(), 1);
  }
  // With other cores than before: a saved job keeps its chunks.
  void restart() {
    server_.kill();
    const uint32_t tile_rows = tile_rows_of(worker());
    workers_.clear();  // else they leave, and the job has ended
    server_.start("pack:1 core:4 pu:1");
    workers_ = join(*server_, spec_of_all_kinds("one"), server_.transport());
    round_ = worker().first_round() - 1;
    EXPECT_EQ(tile_rows_of(worker()), tile_rows);
  }
  // What branch 1 has, which makes a round then.
  Model run_it() {
    const BranchTurn turns[] = {{1, 1}, {0, 0}};
    const uint64_t at = worker().schedule(turns);
    run_some(at - round_ - 1);
    Model model = model_of(worker());
    push(worker(), 777, 1);
    ++round_;
    return model;
  }
  // The same in a job in which nothing is killed.
  std::vector<Model> never_killed(int runs) {
    Workers one = std::exchange(workers_, {});
    const uint64_t round = round_;
    begin("twin");
    std::vector<Model> models;
    for (int i = 0; i < runs; ++i) models.push_back(run_it());
    workers_ = std::move(one);
    round_ = round;
    return models;
  }
  Worker& worker() { return *workers_[0]; }

  SavingServer server_{PHUB_BINARY, GetParam()};
  Workers workers_;
  SeenRounds seen_;
  uint64_t round_ = 0;
};

TEST_P(OneKilled, LeavesRoomForAnotherAndComesBack) {
  begin();
  worker().fork(0);
  expect_error(ErrorCode::kFull, "no room for another", [&] { worker().fork(0); });
  EXPECT_GT(worker().kill(1), round_);
  EXPECT_GT(status_of(worker(), 1).killed, round_);
  expect_error(ErrorCode::kFull, "until branch 1, which is killed, is in a checkpoint",
               [&] { worker().fork(0); });
  run_some();
  await_on_disk(worker(), 1);
  EXPECT_EQ(worker().fork(0).branch, 5u) << "refused forks have numbers, too";
  expect_error(ErrorCode::kFull, "no room for another", [&] { worker().revive(1); });
  expect_error(ErrorCode::kInvalid, "revive it first", [&] { worker().fork(1); });
  const BranchTurn turns[] = {{1, 0}};
  expect_error(ErrorCode::kInvalid, "revive it first", [&] { worker().schedule(turns); });
  expect_error(ErrorCode::kInvalid, "killed already", [&] { worker().kill(1); });
  expect_error(ErrorCode::kInvalid, "schedule another", [&] { worker().kill(0); });
  expect_error(ErrorCode::kInvalid, "is not killed", [&] { worker().revive(0); });
  expect_error(ErrorCode::kNotFound, "no branch 9", [&] { worker().kill(9); });
  expect_error(ErrorCode::kNotFound, "no branch 9", [&] { worker().revive(9); });
  worker().discard(5);
  worker().revive(1);
  EXPECT_EQ(status_of(worker(), 1).killed, 0u);
  EXPECT_FALSE(status_of(worker(), 1).on_disk);
}

TEST_P(OneKilled, IsWhatItWasAfterARestartToo) {
  begin();
  std::vector<Model> models = {run_it()};
  kill_on_disk();
  run_some();
  save(worker());
  restart();
  ASSERT_TRUE(status_of(worker(), 1).on_disk);
  EXPECT_EQ(server_.files_of(1).size(), 4u) << "two checkpoints have it";
  worker().revive(1);
  models.push_back(run_it());
  models.push_back(run_it());
  EXPECT_TRUE(models == never_killed(3));
}

// The checkpoint before has it on its shelf.
TEST_P(OneKilled, IsAliveWhereTheBoxDiesBeforeItIsSaved) {
  begin();
  save(worker());
  worker().kill(1, round_ + 1000);
  restart();
  EXPECT_EQ(status_of(worker(), 1).killed, 0u);
  EXPECT_TRUE(std::vector<Model>{run_it()} == never_killed(1));
}

// A kill that is decided for a later round goes on, and so does a revival.
TEST_P(OneKilled, DecisionsToComeSurvive) {
  begin();
  const uint64_t at = round_ + 6;
  EXPECT_EQ(worker().kill(1, at), at);
  save(worker());
  restart();
  EXPECT_EQ(status_of(worker(), 1).killed, at);
  EXPECT_FALSE(status_of(worker(), 1).on_disk);
  run_some(at - round_);
  await_on_disk(worker(), 1);
  EXPECT_EQ(worker().revive(1, round_ + 9), round_ + 9);
  run_some(1);  // the checkpoint that the kill needed is one of the round before
  save(worker());
  restart();
  EXPECT_EQ(status_of(worker(), 1).killed, 0u);
  run_some(12);
  EXPECT_TRUE(std::vector<Model>{run_it()} == never_killed(1));
}

TEST_P(OneKilled, IsRevivedFromItsShelfIfItIsStillThere) {
  begin();
  const uint64_t at = worker().kill(1, round_ + 5);
  EXPECT_EQ(worker().revive(1), at);
  run_some(8);
  EXPECT_EQ(status_of(worker(), 1).killed, 0u);
  EXPECT_TRUE(server_.files_of(1).empty()) << "no checkpoint was needed";
}

TEST_P(OneKilled, ComesBackAsOftenAsItIsKilled) {
  workers_ = join(*server_, spec_of_all_kinds("one", 1), server_.transport());
  worker().fork(0);
  run_some();
  for (int i = 0; i < 3; ++i) {
    worker().kill(1);  // right after the revival: no round has begun since
    run_some();
    await_on_disk(worker(), 1);
    run_some();
    worker().revive(1);
  }
  EXPECT_EQ(status_of(worker(), 1).killed, 0u);
}

TEST_P(OneKilled, LiesInOneFileForAllCheckpoints) {
  begin();
  kill_on_disk();
  const std::vector<fs::path> first = server_.files_of(1);
  ASSERT_EQ(first.size(), 2u);  // parameters, momentum
  for (int i = 0; i < 5; ++i) {
    run_some();
    save(worker());
  }
  const std::vector<fs::path> files = server_.files_of(1);
  EXPECT_EQ(files.size(), 2u * 3) << "three checkpoints are kept";
  for (const fs::path& file : files) EXPECT_EQ(fs::hard_link_count(file), 3u);
  worker().discard(1);
  for (int i = 0; i < 4; ++i) {
    run_some();
    save(worker());
  }
  EXPECT_TRUE(server_.files_of(1).empty());
}

TEST_P(OneKilled, DamageIsToldAndTheJobGoesOn) {
  begin();
  kill_on_disk();
  for (const fs::path& file : server_.files_of(1)) {
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(2000)
        .put('?')
        .put('!');
  }
  expect_error(ErrorCode::kInvalid, "branch 1 cannot be revived", [&] { worker().revive(1); });
  run_some();
  save(worker());
  restart();
  EXPECT_TRUE(status_of(worker(), 1).on_disk);
  expect_error(ErrorCode::kInvalid, "was damaged", [&] { worker().revive(1); });
  for (const fs::path& file : server_.files_of(1)) fs::remove(file);
  expect_error(ErrorCode::kNotFound, "branch 1 cannot be revived", [&] { worker().revive(1); });
  run_some();
  save(worker());
  EXPECT_EQ(worker().fork(0).branch, 2u);
  worker().discard(1);
  run_some(4);
}

// What the killed branch has is at the server: the job goes on from there.
TEST_P(OneKilled, IsWhatItWasAfterAShardHasDied) {
  if (GetParam() == 0) GTEST_SKIP() << "there is no shard";
  begin();
  std::vector<Model> models = {run_it()};
  kill_on_disk();
  run_some();
  save(worker());
  server_.restart_shard(1);
  workers_.clear();
  workers_ = join(*server_, spec_of_all_kinds("one"), server_.transport());
  round_ = worker().first_round() - 1;
  EXPECT_EQ(boxes_of("one"), 1 + GetParam());
  ASSERT_TRUE(status_of(worker(), 1).on_disk);
  worker().revive(1);
  models.push_back(run_it());
  EXPECT_TRUE(models == never_killed(2));
}

// Other tools read a branch as they read the model: from files of its own.
TEST(SavedBranches, LieInFilesOfTheirOwn) {
  const SavingServer server(PHUB_BINARY, 0);
  const Workers workers = join(*server, spec_of("files"), "shm");
  Worker& worker = *workers[0];
  EXPECT_EQ(worker.fork(0, {{"lr", 0.25}}, 3).round, 3u);
  const BranchTurn turns[] = {{1, 1}, {0, 1}, {1, 0}};
  EXPECT_EQ(worker.schedule(turns, 5), 5u);
  SeenRounds seen;
  train(workers, 1, 5, seen);
  save(worker);
  train(workers, 6, 6, seen);
  ASSERT_EQ(seen[4].first, 0u);
  ASSERT_EQ(seen[5].first, 1u) << "as it was behind round 5, in which it ran";

  Checkpoints checkpoints(server.folder());
  const auto reader = checkpoints.open("files", checkpoints.list("files").front());
  EXPECT_TRUE(reader->verify().empty());
  EXPECT_EQ(reader->manifest().branches.shelves,
            (std::vector<SavedShelf>{{.place = 1, .branch = 1, .steps = {3}}}));
  const auto model_in = [&](const std::string& file) {
    Model model;
    for (size_t key = 0; key < worker.keys(); ++key) {
      model.emplace_back(worker.parameter_bytes(key).size());
      reader->read_tensor(file, key, 0, model.back());
    }
    return model;
  };
  EXPECT_TRUE(model_in("parameters.safetensors") == seen[4].second);
  EXPECT_TRUE(model_in("branch-1-parameters.safetensors") == seen[5].second);
  EXPECT_TRUE(reader->has("branch-1-state-momentum_buffer.safetensors"));
}

TEST(KilledBranchesWithoutFiles, AreRefused) {
  Box box(2);
  Worker worker(box.options(spec_of("none")));
  worker.wait_all();
  worker.fork(0);
  expect_error(ErrorCode::kInvalid, "keeps no checkpoints", [&] { worker.kill(1); });
  expect_error(ErrorCode::kInvalid, "is not killed", [&] { worker.revive(1); });
}

INSTANTIATE_TEST_SUITE_P(Every, OneKilled, ::testing::Values(0, 2), name_of_shards);

}  // namespace killed_branches_test
}  // namespace phub::testing
