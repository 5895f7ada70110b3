// Branches of saved jobs, of which some are killed and revived: to the bit what they would be if
// neither they nor their box had ever been killed, with keys of every kind; and what becomes of
// their files. In one box, and in three of which two are shards.
#include "tests/worker/killed_branches.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/oracle/reference.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/branch_rounds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/training.h"
#include "worker/worker.h"

namespace phub::testing {
namespace killed_branches_test {

namespace fs = std::filesystem;

// A decision that is one for a job whose branches are never killed, too.
struct Decision {
  BranchAction action;
  uint64_t round = 0;
  uint32_t branch = 0;
  std::map<std::string, double> values = {};
  std::vector<BranchTurn> turns = {};
};
using Decisions = std::map<uint64_t, std::vector<Decision>>;  // by the round before which

void carry_out(Worker& worker, const Decision& decision) {
  switch (decision.action) {
    case BranchAction::kFork:
      EXPECT_EQ(worker.fork(decision.branch, decision.values, decision.round).round,
                decision.round);
      return;
    case BranchAction::kSchedule:
      EXPECT_EQ(worker.schedule(decision.turns, decision.round), decision.round);
      return;
    default:
      EXPECT_EQ(worker.discard(decision.branch, decision.round), decision.round);
  }
}

// Decides at random what there is room for.
class Decider {
 public:
  explicit Decider(uint64_t seed) : random_(seed) {}

  void decide(Worker& worker, uint64_t round) {
    for (uint64_t i = below(3); i > 0; --i) {
      if (last_ > round + 8) return;
      decide_one(worker, std::max(last_, round + 2 + below(2)), round);
    }
  }
  // Decides since the last checkpoint: no job goes on with it.
  void decide_what_is_void(Worker& worker) {
    const BranchTurn turns[] = {{any_of(alive_), 1}, {any_of(alive_), 0}};
    worker.schedule(turns);
    if (room(worker)) worker.fork(any_of(alive_), {{"lr", 0.5}});
  }
  std::vector<uint32_t> killed() const {
    std::vector<uint32_t> branches;
    for (const auto& [branch, round] : killed_) branches.push_back(branch);
    return branches;
  }
  uint64_t last() const { return last_; }

  Decisions made;  // without kills and revivals
  uint64_t kills = 0, revivals = 0, from_disk = 0;

 private:
  uint64_t below(uint64_t n) { return random_() % n; }
  uint32_t any_of(const std::set<uint32_t>& branches) {
    return *std::next(branches.begin(), static_cast<int64_t>(below(branches.size())));
  }

  static bool room(Worker& worker) {
    const std::vector<BranchStatus> all = worker.branches().branches;
    const auto on_disk = std::ranges::count(all, true, &BranchStatus::on_disk);
    return all.size() - static_cast<size_t>(on_disk) <= kShelves;
  }

  void decide_one(Worker& worker, uint64_t at, uint64_t round) {
    const bool has_room = room(worker);
    const uint32_t branch = any_of(alive_);
    const uint64_t what = below(8);
    if (what == 0 && has_room) {
      Decision fork{.action = BranchAction::kFork, .round = at, .branch = branch};
      fork.values["lr"] = 0.015625 * static_cast<double>(1 + below(8));
      alive_.insert(next_++);
      return decided(worker, std::move(fork), round);
    }
    if ((what == 1 || what == 4) && branch != running_) {
      EXPECT_EQ(worker.kill(branch, at), at);
      alive_.erase(branch);
      killed_[branch] = at;
      last_ = at;
      ++kills;
      return;
    }
    if ((what == 2 || what == 5) && !killed_.empty()) {
      const auto [killed, since] = *std::next(killed_.begin(), below(killed_.size()));
      if (below(4) > 0 && since > round) return;
      if (since <= round) await_on_disk(worker, killed);
      return revive(worker, killed, at);
    }
    if (what == 3 && branch != running_ && below(3) == 0) {
      alive_.erase(branch);
      return decided(worker, {.action = BranchAction::kDiscard, .round = at, .branch = branch},
                     round);
    }
    Decision turns{.action = BranchAction::kSchedule, .round = at};
    for (uint64_t left = 1 + below(3); left > 0; --left) {
      running_ = any_of(alive_);
      turns.turns.push_back({running_, left > 1 ? 1 + below(2) : 0});
    }
    decided(worker, std::move(turns), round);
  }

  void revive(Worker& worker, uint32_t branch, uint64_t at) {
    const bool was_on_disk = status_of(worker, branch).on_disk, has_room = room(worker);
    if (was_on_disk && !has_room) {
      return expect_error(ErrorCode::kFull, "no room", [&] { worker.revive(branch, at); });
    }
    try {
      EXPECT_EQ(worker.revive(branch, at), at);
    } catch (const Error& error) {  // it was revived for a later round, and discarded since
      EXPECT_THAT(error.what(), ::testing::HasSubstr("wait for that round"));
      return;
    }
    killed_.erase(branch);
    alive_.insert(branch);
    last_ = at;
    ++revivals;
    from_disk += was_on_disk;
  }

  void decided(Worker& worker, Decision decision, uint64_t round) {
    carry_out(worker, decision);
    last_ = decision.round;
    for (const BranchTurn& turn : decision.turns) last_ += turn.rounds;
    made[round].push_back(std::move(decision));
  }

  std::mt19937_64 random_;
  std::set<uint32_t> alive_ = {0};
  std::map<uint32_t, uint64_t> killed_;  // before which round
  uint32_t running_ = 0, next_ = 1;
  uint64_t last_ = 0;
};

// At the end every branch runs for two rounds, those that are killed too.
void visit_all(const Workers& workers, uint64_t round, const std::vector<uint32_t>& killed,
               SeenRounds& seen) {
  Worker& worker = *workers[0];
  for (const uint32_t branch : killed) {
    await_on_disk(worker, branch);
  }
  uint64_t at = round + 40;
  std::set<uint32_t> there;
  for (const BranchStatus& status : worker.branches().branches) {
    if (!status.on_disk) there.insert(status.branch);
  }
  const auto visit = [&](uint32_t branch) {
    const BranchTurn turns[] = {{branch, 2}, {*there.begin(), 0}};
    EXPECT_EQ(worker.schedule(turns, at), at);
    at += 2;
  };
  for (const uint32_t branch : there) visit(branch);
  for (const uint32_t branch : killed) {
    train(workers, round, at, seen);  // what was revived before has its shelf
    round = at + 1;
    at += 3;
    if (there.size() > kShelves) {
      EXPECT_EQ(worker.discard(*there.rbegin(), at), at);
      there.erase(*there.rbegin());
    }
    EXPECT_EQ(worker.revive(branch, at), at);
    there.insert(branch);
    const BranchTurn turns[] = {{branch, 2}, {*there.begin(), 0}};
    EXPECT_EQ(worker.schedule(turns, at + 1), at + 1);
    at += 3;
  }
  train(workers, round, at, seen);
}

// The same decisions, where nobody is killed; and the same visits.
void visit_all_alive(const Workers& workers, uint64_t round, const std::vector<uint32_t>& killed,
                     SeenRounds& seen) {
  Worker& worker = *workers[0];
  uint64_t at = round + 40;
  std::set<uint32_t> there;
  for (const BranchStatus& status : worker.branches().branches) {
    if (std::ranges::count(killed, status.branch) == 0) there.insert(status.branch);
  }
  for (const uint32_t branch : there) {
    const BranchTurn turns[] = {{branch, 2}, {*there.begin(), 0}};
    EXPECT_EQ(worker.schedule(turns, at), at);
    at += 2;
  }
  for (const uint32_t branch : killed) {
    at += 3;
    if (there.size() > kShelves) there.erase(*there.rbegin());
    there.insert(branch);
    const BranchTurn turns[] = {{branch, 2}, {*there.begin(), 0}};
    EXPECT_EQ(worker.schedule(turns, at + 1), at + 1);
    at += 3;
  }
  train(workers, round, at, seen);
}

void expect_same(const SeenRounds& got, const SeenRounds& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, want[i].first) << "after round " << i + 1;
    ASSERT_TRUE(got[i].second == want[i].second) << "after round " << i + 1;
  }
}

// Dense keys, and matrices whose factors or rows are sent.
JobSpec spec_of_all_kinds(const std::string& name, uint32_t branches, const std::string& optimizer,
                          const std::string& dtype) {
  JobSpec spec = spec_of(name, 2, branches);
  spec.optimizer = optimizer;
  if (optimizer != "momentum") spec.hyper.erase("momentum");
  spec.gradient_dtype = spec.parameter_dtype = dtype;
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

class KilledBranches : public ::testing::TestWithParam<size_t> {};

TEST_P(KilledBranches, AreToTheBitAsIfTheyHadNeverBeen) {
  const Seeds seeds = fresh_seeds(scaled(4));
  const std::vector<std::pair<std::string, std::string>> kinds = {{"adam", "f32"},
                                                                  {"momentum", "bf16"},
                                                                  {"momentum", "f32"},
                                                                  {"sgd", "f32"},
                                                                  {"rmsprop", "f16"}};
  uint64_t kills = 0, revivals = 0, from_disk = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    SavingServer server(PHUB_BINARY, GetParam(), 1 + static_cast<uint32_t>(random() % 2));
    const auto& [optimizer, dtype] = kinds[seed % kinds.size()];
    Decider decider(seed);
    SeenRounds seen, want;
    uint64_t round = 0;
    uint32_t tile_rows = 0;
    for (int life = 0; life < 3; ++life) {
      if (life > 0) server.start(life == 1 ? "pack:1 core:4 pu:1" : "pack:1 core:3 pu:1");
      const Workers workers = join(*server, spec_of_all_kinds("killed", kShelves, optimizer, dtype),
                                   life == 1 ? "tcp" : server.transport());
      ASSERT_EQ(workers[0]->first_round(), round + 1);
      if (life == 0) tile_rows = tile_rows_of(*workers[0]);
      ASSERT_EQ(tile_rows_of(*workers[0]), tile_rows) << "a saved job keeps its chunks";
      const uint64_t last = round + 12 + random() % 20;
      train(workers, round + 1, last, seen,
            [&](uint64_t now) { decider.decide(*workers[0], now); });
      round = last;
      if (life < 2) {
        ASSERT_EQ(save(*workers[0]), last);
        decider.decide_what_is_void(*workers[0]);
        server.kill();
        continue;
      }
      const uint64_t end = std::max(round, decider.last()) + 2;
      train(workers, round + 1, end, seen);
      round = end;
      visit_all(workers, round + 1, decider.killed(), seen);
    }
    const Workers workers = join(*server, spec_of_all_kinds("alive", 60, optimizer, dtype), "tcp");
    EXPECT_NE(tile_rows_of(*workers[0]), tile_rows) << "there are other cores than at first";
    train(workers, 1, round, want, [&](uint64_t now) {
      if (!decider.made.contains(now)) return;
      for (const Decision& decision : decider.made.at(now)) carry_out(*workers[0], decision);
    });
    visit_all_alive(workers, round + 1, decider.killed(), want);
    expect_same(seen, want);
    kills += decider.kills;
    revivals += decider.revivals;
    from_disk += decider.from_disk;
    if (HasFailure()) return;
  }
  fmt::print("{} kills, {} revived, {} of them from disk\n", kills, revivals, from_disk);
  if (seeds.count > 1) {
    EXPECT_GT(kills, 0u);
    EXPECT_GT(from_disk, 0u);
  }
}

class OneKilled : public ::testing::TestWithParam<size_t> {
 protected:
  // Branch 1 has made a round of its own, and lies on its shelf from round 6 on.
  void begin(const std::string& job = "one") {
    workers_ = join(*server_, spec_of(job), server_.transport());
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
  void restart() {
    server_.kill();
    workers_.clear();  // else they leave, and the job has ended
    server_.start();
    workers_ = join(*server_, spec_of("one"), server_.transport());
    round_ = worker().first_round() - 1;
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
  workers_ = join(*server_, spec_of("one", 1, 1), server_.transport());
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
  workers_ = join(*server_, spec_of("one"), server_.transport());
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

INSTANTIATE_TEST_SUITE_P(Every, KilledBranches, ::testing::Values(0, 2), name_of_shards);
INSTANTIATE_TEST_SUITE_P(Every, OneKilled, ::testing::Values(0, 2), name_of_shards);

}  // namespace killed_branches_test
}  // namespace phub::testing
