// A saved job with branches: after its server was killed it goes on to the bit, with all of them
// and with what was decided for rounds to come; as jobs of other ranks, transports and topologies.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/oracle/reference.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/branch_rounds.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "worker/worker.h"

namespace phub::testing {
namespace restored_branches_test {

constexpr uint32_t kLongMs = 120'000;
constexpr uint64_t kRounds = 24;
using Workers = std::vector<std::unique_ptr<Worker>>;

JobSpec spec_of(const std::string& name, const std::string& optimizer, const std::string& dtype) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 3000, .priority = 1},
               {.name = "b", .elements = 7, .lr_scale = 0.5, .group = 1},
               {.name = "c", .elements = 640}};
  spec.world_size = 2;
  spec.chunk_elements = 96;
  spec.optimizer = optimizer;
  spec.gradient_dtype = spec.parameter_dtype = dtype;
  spec.hyper = {{"lr", 0.0625}, {"lr_exponential", 0.9}, {"lr_warmup", 3}};
  spec.branches = 3;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// What rank 0 decides before a round, for later ones.
struct Decision {
  BranchAction action;
  uint64_t round = 0;
  uint32_t branch = 0;
  std::map<std::string, double> values = {};
  std::vector<BranchTurn> turns = {};
};

// Random decisions by the round before which they are made, all of which can be carried out: they
// hold from rounds that do not descend, and two rounds later at the earliest.
using Decisions = std::map<uint64_t, std::vector<Decision>>;
Decisions decisions_of(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t n) { return random() % n; };
  Decisions all;
  std::vector<uint32_t> alive = {0};
  uint32_t running = 0, next = 1;
  uint64_t last = 0;
  for (uint64_t round = 1; round + 4 < kRounds; ++round) {
    for (uint64_t i = below(3); i > 0 && last < round + 6; --i) {
      Decision decision{.action = BranchAction::kFork,
                        .round = std::max(last, round + 2 + below(2)),
                        .branch = alive[below(alive.size())]};
      const uint64_t what = below(5);
      if (what < 2 && alive.size() < 4) {
        decision.values["lr"] = 0.015625 * static_cast<double>(1 + below(8));
        alive.push_back(next++);
      } else if (what == 2 && decision.branch != running) {
        decision.action = BranchAction::kDiscard;
        std::erase(alive, decision.branch);
      } else {
        decision.action = BranchAction::kSchedule;
        for (uint64_t turns = 1 + below(4); turns > 0; --turns) {
          running = alive[below(alive.size())];
          const uint64_t rounds = turns > 1 ? 1 + below(3) : 0;
          decision.turns.push_back({running, rounds});
        }
      }
      last = decision.round;
      for (const BranchTurn& turn : decision.turns) last += turn.rounds;
      all[round].push_back(std::move(decision));
    }
  }
  return all;
}

void decide(Worker& worker, const Decision& decision) {
  const uint64_t round = decision.round;
  switch (decision.action) {
    case BranchAction::kFork:
      EXPECT_EQ(worker.fork(decision.branch, decision.values, round).round, round);
      return;
    case BranchAction::kSchedule:
      EXPECT_EQ(worker.schedule(decision.turns, round), round);
      return;
    default:
      EXPECT_EQ(worker.discard(decision.branch, round), round);
  }
}

Workers join(const ServerProcess& server, const JobSpec& spec, const std::string& transport) {
  Workers workers(spec.world_size);
  each_rank(spec.world_size, [&](uint32_t rank) {
    WorkerOptions options = server.options(spec);
    options.rank = static_cast<int32_t>(rank);
    options.transport = transport;
    workers[rank] = std::make_unique<Worker>(options);
    workers[rank]->wait_all();
  });
  return workers;
}

// What rank 0 has after each of the rounds, and which branch the next is of.
using Seen = std::vector<std::pair<uint32_t, Model>>;
void train(const Workers& workers, uint64_t first, uint64_t last, const Decisions& decisions,
           Seen& seen) {
  each_rank(static_cast<uint32_t>(workers.size()), [&](uint32_t rank) {
    Worker& worker = *workers[rank];
    for (uint64_t round = first; round <= last; ++round) {
      if (rank == 0 && decisions.contains(round)) {
        for (const Decision& decision : decisions.at(round)) decide(worker, decision);
      }
      push(worker, round, worker.branch_in(round));
      if (rank == 0) seen.emplace_back(worker.branch_in(round + 1), model_of(worker));
    }
  });
}

// At the end every branch that there is runs for two rounds.
void visit_all(const Workers& workers, uint64_t round, Seen& seen) {
  std::vector<BranchTurn> turns;
  for (const BranchStatus& branch : workers[0]->branches().branches) {
    turns.push_back({branch.branch, 2});
  }
  turns.back().rounds = 0;
  EXPECT_EQ(workers[0]->schedule(turns, round + 20), round + 20);
  train(workers, round, round + 20 + 2 * turns.size(), {}, seen);
}

// Since the checkpoint: nobody goes on with it.
void decide_what_is_void(Worker& worker) {
  const std::vector<BranchStatus> branches = worker.branches().branches;
  const BranchTurn turns[] = {{branches.front().branch, 1}, {branches.back().branch, 0}};
  worker.schedule(turns);
  if (branches.size() < 4) worker.fork(branches.back().branch, {{"lr", 0.5}});
}

TEST(RestoredBranches, GoOnToTheBit) {
  const Seeds seeds = fresh_seeds(scaled(4));
  const std::vector<std::pair<std::string, std::string>> kinds = {
      {"adam", "f32"}, {"momentum", "bf16"}, {"sgd", "f32"}, {"rmsprop", "f16"}};
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto& [optimizer, dtype] = kinds[seed % kinds.size()];
    const Decisions decisions = decisions_of(seed);
    const TemporaryDirectory directory = TemporaryDirectory::in_memory();
    std::optional<ServerProcess> server;
    const auto serve = [&](const std::string& topology) {
      server.emplace(PHUB_BINARY,
                     std::vector<std::string>{"--checkpoints", directory.path() + "/checkpoints",
                                              "--checkpoint-every", "1000000"},
                     "127.0.0.1:0", topology);
    };
    Seen saved, without;
    uint64_t round = 0;
    const JobSpec spec = spec_of("saved", optimizer, dtype);
    for (int life = 0; life < 3; ++life) {
      serve(life == 1 ? "pack:1 core:4 pu:1" : "pack:1 core:2 pu:1");
      const Workers workers = join(*server, spec, life == 1 ? "tcp" : "shm");
      ASSERT_EQ(workers[0]->first_round(), round + 1);
      const uint64_t last = life == 2 ? kRounds : round + 1 + random() % (kRounds / 3);
      train(workers, round + 1, last, decisions, saved);
      round = last;
      if (life == 2) {
        visit_all(workers, round + 1, saved);
        break;
      }
      workers[0]->await_checkpoint(workers[0]->checkpoint(), kLongMs);
      decide_what_is_void(*workers[0]);
      EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
    }
    const Workers workers = join(*server, spec_of("without-a-break", optimizer, dtype), "tcp");
    train(workers, 1, kRounds, decisions, without);
    visit_all(workers, kRounds + 1, without);
    ASSERT_EQ(saved.size(), without.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      EXPECT_EQ(saved[i].first, without[i].first) << "after round " << i + 1;
      ASSERT_TRUE(saved[i].second == without[i].second) << "after round " << i + 1;
    }
  }
}

// Other tools read a branch as they read the model: from files of its own.
TEST(RestoredBranches, LieInFilesOfTheirOwn) {
  const TemporaryDirectory directory = TemporaryDirectory::in_memory();
  const ServerProcess server(
      PHUB_BINARY,
      {"--checkpoints", directory.path() + "/checkpoints", "--checkpoint-every", "1000000"},
      "127.0.0.1:0", "pack:1 core:2 pu:1");
  JobSpec spec = spec_of("files", "momentum", "f32");
  spec.world_size = 1;
  const Workers workers = join(server, spec, "shm");
  Worker& worker = *workers[0];
  const Decisions decisions = {
      {1,
       {{.action = BranchAction::kFork, .round = 3, .values = {{"lr", 0.25}}},
        {.action = BranchAction::kSchedule, .round = 5, .turns = {{1, 1}, {0, 1}, {1, 0}}}}}};
  Seen seen;
  train(workers, 1, 5, decisions, seen);
  worker.await_checkpoint(worker.checkpoint(), kLongMs);
  train(workers, 6, 6, decisions, seen);
  ASSERT_EQ(seen[4].first, 0u);
  ASSERT_EQ(seen[5].first, 1u) << "as it was behind round 5, in which it ran";

  Checkpoints checkpoints(directory.path() + "/checkpoints");
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

}  // namespace restored_branches_test
}  // namespace phub::testing
