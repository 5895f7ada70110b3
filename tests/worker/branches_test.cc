// Branches of a job, on a whole box: each is, to the bit, what a job of its own would be.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/reference.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/box.h"
#include "tests/worker/branch_rounds.h"
#include "tests/worker/expect_error.h"
#include "transport/control/control_client.h"

namespace phub {
namespace branches_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using Values = std::map<std::string, double>;
using testing::Model;
using testing::model_of;
using testing::push;

JobSpec spec_of(const std::string& name, uint32_t ranks = 2) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000, .priority = 1},
               {.name = "b", .elements = 7, .lr_scale = 0.5, .group = 1},
               {.name = "c", .elements = 640}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.125}, {"momentum", 0.5}, {"lr_exponential", 0.9}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

void use(JobSpec& spec, const std::string& optimizer) {
  spec.optimizer = optimizer;
  if (optimizer != "momentum" && optimizer != "nesterov") spec.hyper.erase("momentum");
}

// What a branch does: the same as its parent for some rounds, then with these values.
struct Life {
  uint32_t parent = 0;
  uint64_t rounds = 0;  // of the parent's, before it was forked
  Values values = {};
};

// The model after each round of the branch, from 0 on, in a job that has no branches.
std::vector<Model> alone(Box& box, JobSpec spec, const std::map<uint32_t, Life>& lives,
                         uint32_t branch, uint64_t rounds, uint32_t seed) {
  spec.branches = 0;
  spec.name += fmt::format("-alone{}", branch);
  std::vector<uint32_t> who(rounds + 1);  // in each of its rounds
  std::map<uint64_t, Values> changes;     // from its rounds on
  uint64_t end = rounds + 1;
  for (uint32_t b = branch;; b = lives.at(b).parent) {
    const Life& life = lives.at(b);
    for (uint64_t n = life.rounds + 1; n < end; ++n) who[n] = b;
    for (const auto& [name, value] : life.values) {
      if (life.rounds < rounds) changes[life.rounds + 1].try_emplace(name, value);
    }
    end = std::min(end, life.rounds + 1);
    if (b == 0) break;
  }
  std::vector<Model> models;
  each_worker(box, spec, [&](Worker& worker, uint32_t r) {
    if (r == 0) models.push_back(model_of(worker));
    for (uint64_t n = 1; n <= rounds; ++n) {
      if (r == 0 && changes.contains(n)) EXPECT_EQ(worker.set_hyper(changes[n], n), n);
      if (changes.contains(n)) worker.barrier();
      push(worker, n, who[n], seed);
      if (r == 0) models.push_back(model_of(worker));
    }
  });
  return models;
}

struct Seen {
  uint32_t branch = 0;  // that the next round is of
  uint64_t own = 0;     // rounds that it has made
  Model model;
};

// The job, and what every rank saw after each round. `decide(worker, round)`: rank 0, before it
// pushes that round.
template <typename Decide>
std::vector<std::vector<Seen>> train(Box& box, const JobSpec& spec, uint64_t rounds, uint32_t seed,
                                     const std::map<uint32_t, Life>& lives, const Decide& decide) {
  std::vector<std::vector<Seen>> seen(spec.world_size);
  each_worker(box, spec, [&](Worker& worker, uint32_t r) {
    std::map<uint32_t, uint64_t> own;
    for (const auto& [branch, life] : lives) own[branch] = life.rounds;
    for (uint64_t round = 1; round <= rounds; ++round) {
      if (r == 0) decide(worker, round);
      const uint32_t branch = worker.branch_in(round);
      push(worker, ++own.at(branch), branch, seed);
      const uint32_t next = worker.branch_in(round + 1);
      seen[r].push_back({next, own.at(next), model_of(worker)});
    }
    worker.barrier();
  });
  return seen;
}

void expect_lives(Box& box, const JobSpec& spec, const std::map<uint32_t, Life>& lives,
                  const std::vector<std::vector<Seen>>& seen, uint32_t seed) {
  std::map<uint32_t, uint64_t> most;
  for (const Seen& now : seen[0]) {
    most.try_emplace(now.branch, 0);
    most[now.branch] = std::max(most[now.branch], now.own);
  }
  for (const auto& [branch, rounds] : most) {
    const std::vector<Model> want = alone(box, spec, lives, branch, rounds, seed);
    for (const std::vector<Seen>& of_rank : seen) {
      for (size_t round = 0; round < of_rank.size(); ++round) {
        if (of_rank[round].branch != branch) continue;
        EXPECT_TRUE(of_rank[round].model == want[of_rank[round].own])
            << "after round " << round + 1 << ": branch " << branch << ", " << of_rank[round].own
            << " rounds of its own";
      }
    }
  }
}

// Two branches are forked and run in turns, every round; then a third is forked from one that does
// not run, and one is discarded to make room.
void take_turns(Box& box, JobSpec spec, uint32_t seed) {
  spec.branches = 2;
  SCOPED_TRACE(fmt::format("{}, PHUB_SEED={}", spec.name, seed));
  const Values slow = {{"lr", 0.03125}}, fast = {{"lr@1", 0.5}, {"weight_decay", 0.25}};
  const std::map<uint32_t, Life> lives = {
      {0, {}}, {1, {0, 3, slow}}, {2, {0, 4, fast}}, {3, {2, 7, {{"lr", 0.25}}}}};
  const auto fork = [&](Worker& worker, uint32_t branch, uint64_t round) {
    const Life& life = lives.at(branch);
    const BranchReply made = worker.fork(life.parent, life.values, round);
    EXPECT_EQ(made.branch, branch);
    EXPECT_EQ(made.round, round);
  };
  const auto schedule = [](Worker& worker, const std::vector<BranchTurn>& turns, uint64_t round) {
    EXPECT_EQ(worker.schedule(turns, round), round);
  };
  const auto seen = train(box, spec, 16, seed, lives, [&](Worker& worker, uint64_t round) {
    if (round == 2) {
      fork(worker, 1, 4);
      fork(worker, 2, 5);
      schedule(worker, {{1, 1}, {0, 1}, {2, 1}, {1, 1}, {2, 2}, {0, 0}}, 5);
    }
    if (round == 10) {
      EXPECT_EQ(worker.branches().branches.size(), 3u);
      EXPECT_EQ(worker.discard(1), 11u) << "from round 10 on it is known with what it began";
      fork(worker, 3, 12);
      schedule(worker, {{3, 2}, {2, 1}, {3, 0}}, 12);
    }
  });
  expect_lives(box, spec, lives, seen, seed);
  std::vector<uint32_t> order;
  for (const Seen& now : seen[0]) order.push_back(now.branch);
  EXPECT_EQ(order, (std::vector<uint32_t>{0, 0, 0, 1, 0, 2, 1, 2, 2, 0, 3, 3, 2, 3, 3, 3}));
}

TEST(Branches, InterleavedTheyAreAsJobsOfTheirOwn) {
  const auto seed = static_cast<uint32_t>(testing::fresh_seeds(1).first);
  Box one{"pack:1 core:1 pu:1"}, four{"pack:2 [numa(memory=1GB)] core:2 pu:1"};
  bool in_one = seed % 2 == 0;  // every optimizer in both boxes, with another format
  for (const std::string optimizer :
       {"sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta"}) {
    JobSpec spec = spec_of("turns-" + optimizer);
    use(spec, optimizer);
    if (optimizer == "rmsprop") spec.hyper["rmsprop_momentum"] = 0.5;
    take_turns(in_one ? one : four, spec, seed);
    spec.name += "-bf16";
    spec.gradient_dtype = spec.parameter_dtype = "bf16";
    take_turns(in_one ? four : one, spec, seed);
    in_one = !in_one;
  }
}

// With one rank there is one order.
TEST(Branches, OutOfLockStepTheyAreToo) {
  const auto seed = static_cast<uint32_t>(testing::fresh_seeds(1).first);
  Box box(2);
  for (const std::string consistency : {"ssp", "async"}) {
    for (const std::string optimizer : {"sgd", "momentum", "adam"}) {
      JobSpec spec = spec_of(fmt::format("{}-{}", consistency, optimizer), 1);
      spec.consistency = consistency;
      spec.slack = consistency == "ssp" ? 2 : 0;
      use(spec, optimizer);
      take_turns(box, spec, seed);
    }
  }
}

TEST(Branches, GatedRoundsAreOfABranchToo) {
  const auto seed = static_cast<uint32_t>(testing::fresh_seeds(1).first);
  Box box(3);
  JobSpec spec = spec_of("gated", 3);
  use(spec, "adam");
  spec.reduction = "mean";
  spec.hyper["max_norm"] = 25;
  take_turns(box, spec, seed);
}

// What a rank reads or sets is of the branch that runs in the round from which it holds.
TEST(Branches, TheStateOfKeysIsThatOfTheBranchThatRuns) {
  Box box(2);
  JobSpec spec = spec_of("states", 1);
  spec.branches = 1;
  Worker worker(box.options(spec));
  worker.wait_all();
  worker.fork(0, {}, 3);
  const BranchTurn turns[] = {{1, 1}, {0, 1}, {1, 0}};
  EXPECT_EQ(worker.schedule(turns, 4), 4u);
  const auto state_of_b = [&worker](uint64_t& steps) {
    std::vector<float> parameters(7), momentum(7);
    KeyState state{.key = 1, .arrays = {parameters, momentum}};
    worker.get_state({&state, 1});
    steps = state.step;
    parameters.insert(parameters.end(), momentum.begin(), momentum.end());
    return parameters;
  };
  uint64_t steps = 0;
  const std::vector<uint64_t> want = {1, 2, 2, 3, 3, 4};  // after rounds: before 4 runs 1, …
  std::vector<std::vector<float>> states;
  for (uint64_t round = 1; round <= 6; ++round) {
    push(worker, round, 0, 1);
    states.push_back(state_of_b(steps));
    EXPECT_EQ(steps, want[round - 1]) << "after round " << round;
  }
  EXPECT_EQ(states[2], states[1]) << "branch 1 as it was forked";
  EXPECT_NE(states[4], states[3]);
}

TEST(Branches, LossesAreThoseOfTheBranchThatRan) {
  Box box(2);
  JobSpec spec = spec_of("losses");
  spec.branches = 1;
  const auto loss = [](uint32_t rank, uint64_t round) {
    return 0.5 * static_cast<double>(round) + rank;
  };
  std::map<uint64_t, uint32_t> ran;
  LossPage page;
  std::vector<RoundLoss> latest;
  each_rank(2, [&](uint32_t r) {
    WorkerOptions options = box.options(spec, r);
    Worker worker(options);
    worker.wait_all();
    for (uint64_t round = 1; round <= 12; ++round) {
      if (r == 0 && round == 2) {
        EXPECT_EQ(worker.fork(0, {{"lr", 0.5}}, 4).branch, 1u);
        const BranchTurn turns[] = {{1, 2}, {0, 3}, {1, 0}};
        EXPECT_EQ(worker.schedule(turns, 5), 5u);
      }
      if (r == 0) ran[round] = worker.branch_in(round);
      if (r == 0 || round % 2 == 0) worker.report_loss(loss(r, round), round % 3 == 0 ? round : 0);
      if (round == 9) worker.report_loss(99, 9);  // it counts once
      if (r == 0 && round == 5) worker.report_loss(-1, 0, "validation");
      push(worker, round, 0, 1);
    }
    expect_error(ErrorCode::kInvalid, "from 1 to", [&] { worker.report_loss(1, 1u << 30); });
    expect_error(ErrorCode::kInvalid, "cannot name a loss",
                 [&] { worker.report_loss(1, 0, "a b"); });
    worker.barrier();
    ControlClient client(options.server);
    if (r == 0) page = client.losses("losses", 3);
    if (r == 0) latest = client.job_status("losses").losses;
    worker.barrier();
  });
  const RoundLoss held_out{
      .round = 5, .branch = ran.at(5), .ranks = 1, .loss = -1, .name = "validation"};
  ASSERT_EQ(latest.size(), 2u);
  EXPECT_EQ(latest[0].round, 11u);
  EXPECT_EQ(latest[1], held_out);
  EXPECT_EQ(std::erase(page.losses, held_out), 1u);
  EXPECT_EQ(page.latest, 12u);
  ASSERT_EQ(page.losses.size(), 9u);
  for (const RoundLoss& of : page.losses) {
    SCOPED_TRACE(of.round);
    const bool both = of.round % 2 == 0;
    EXPECT_EQ(of.branch, ran.at(of.round));
    if (of.round == 9) continue;  // rank 1 said one thing, rank 0 another before it
    EXPECT_EQ(of.ranks, both ? 2u : 1u);
    EXPECT_EQ(of.loss, loss(0, of.round) + (both ? 0.5 : 0));
  }
  EXPECT_EQ(page.losses[6].loss, (loss(0, 9) + 99) / 2);
}

TEST(Branches, AForkThatFindsNoRoomChangesNothing) {
  Box box(2);
  JobSpec spec = spec_of("room", 1);
  spec.branches = 1;
  Worker worker(box.options(spec));
  worker.wait_all();
  EXPECT_EQ(worker.fork(0).round, 2u) << "in round 1 it is known with what that began";
  expect_error(ErrorCode::kFull, "no room for another", [&] { worker.fork(0); });
  expect_error(ErrorCode::kNotFound, "no branch 7", [&] { worker.fork(7); });
  expect_error(ErrorCode::kNotFound, "no branch 7", [&] { worker.discard(7); });
  expect_error(ErrorCode::kInvalid, "schedule another", [&] { worker.discard(0); });
  expect_error(ErrorCode::kInvalid, "leaning_rate", [&] { worker.fork(0, {{"leaning_rate", 1}}); });
  expect_error(ErrorCode::kInvalid, "too far", [&] { worker.discard(1, uint64_t{1} << 40); });
  const BranchTurn endless[] = {{1, 0}, {0, 0}};
  expect_error(ErrorCode::kInvalid, "turns[0].rounds", [&] { worker.schedule(endless); });
  EXPECT_EQ(worker.branches().branches.size(), 2u);
  const uint64_t gone = worker.discard(1);
  EXPECT_EQ(worker.fork(0).round, gone);
}

TEST(Branches, TheStatusHasThem) {
  Box box(2);
  JobSpec spec = spec_of("status", 1);
  spec.branches = 3;
  Worker worker(box.options(spec));
  worker.wait_all();
  const uint32_t child = worker.fork(0, {}, 3).branch;
  const BranchTurn turns[] = {{child, 0}};
  worker.schedule(turns, 4);
  for (uint64_t round = 1; round <= 5; ++round) push(worker, round, 0, 1);
  std::vector<float> parameters(7), momentum(7);
  KeyState state{.key = 1, .arrays = {parameters, momentum}};
  worker.get_state({&state, 1});  // then the server knows which rounds are complete
  const std::vector<BranchStatus> want = {
      {.branch = 0, .rounds = 3},
      {.branch = child, .parent = 0, .round = 3, .rounds = 4, .runs = true}};
  EXPECT_EQ(box.status().jobs.at(0).branches, want);
  EXPECT_EQ(worker.branches().runs, (std::vector<BranchRun>{{4, child}}));
  EXPECT_EQ(worker.branch_in(100), child);
  expect_error(ErrorCode::kNotFound, "forgotten", [&] { worker.branch_in(2); });
}

TEST(Branches, TheirMemoryIsCounted) {
  Box box(2);
  uint64_t bytes[4] = {};
  for (uint32_t branches = 1; branches < 4; ++branches) {
    JobSpec spec = spec_of(fmt::format("memory{}", branches), 1);
    spec.branches = branches;
    Worker worker(box.options(spec));
    worker.wait_all();
    bytes[branches] = box.status().jobs.at(0).memory_bytes;
    worker.leave();
    ASSERT_TRUE(box.becomes_empty());
  }
  // Other boxes count what they have.
  const bool is_spread = std::getenv("PHUB_TEST_SHARDS") != nullptr;
  const uint64_t arrays = is_spread ? 1 : 2 * sizeof(float) * (5000 + 7 + 640);
  EXPECT_GE(bytes[2], bytes[1] + arrays);
  EXPECT_EQ(bytes[3] - bytes[2], bytes[2] - bytes[1]);
}

TEST(Branches, RanksAreToldOfTheBatchOfEachBranch) {
  Box box(2);
  JobSpec spec = spec_of("batches", 2);
  spec.branches = 2;
  spec.hyper["batch"] = 64;
  each_worker(box, spec, [&](Worker& worker, uint32_t r) {
    if (r == 0) {
      EXPECT_EQ(worker.fork(0, {{"batch", 8}}, 3).branch, 1u);
      EXPECT_EQ(worker.fork(1, {{"lr", 0.5}}, 4).branch, 2u);
      const std::vector<BranchTurn> turns = {{1, 2}, {2, 1}, {0, 0}};
      EXPECT_EQ(worker.schedule(turns, 5), 5u);
      EXPECT_EQ(worker.set_hyper({{"batch", 16}}, 10), 10u);
      EXPECT_EQ(worker.discard(1), 10u) << "it has its rounds, and its batch in them";
    }
    worker.barrier();
    std::vector<uint64_t> batches;
    for (uint64_t round = 1; round <= 10; ++round) {
      batches.push_back(worker.batch_in(round));
      push(worker, round, 0, 1);
    }
    EXPECT_EQ(batches, (std::vector<uint64_t>{64, 64, 64, 64, 8, 8, 8, 64, 64, 16}));
    worker.barrier();
    if (r == 0) {
      EXPECT_EQ(worker.set_hyper({{"batch", 4}}, 11), 12u) << "others may have begun round 11";
      expect_error(ErrorCode::kNotFound, "forgotten", [&] { worker.batch_in(2); });
    }
    worker.barrier();
  });
}

// There a branch is a state of the ranks: results are those of a job without branches.
TEST(Branches, WithoutAnOptimizerResultsStaySums) {
  Box box(2);
  for (const char* format : {"f32", "bf16"}) {
    SCOPED_TRACE(format);
    std::map<uint32_t, std::vector<Model>> seen;
    for (const uint32_t branches : {0u, 2u}) {
      JobSpec spec = spec_of(fmt::format("sums-{}-{}", format, branches));
      spec.optimizer = "none";
      spec.parameter_dtype = format;
      spec.hyper.clear();
      spec.branches = branches;
      each_worker(box, spec, [&](Worker& worker, uint32_t r) {
        if (r == 0 && branches > 0) {
          const Values own = {{"lr", 0.5}, {"beta1", 0.25}, {"rmsprop_momentum", 0.5}};
          EXPECT_EQ(worker.fork(0, own, 3).branch, 1u);
          EXPECT_EQ(worker.fork(1, {{"lr", 0.25}}, 4).branch, 2u);
          const std::vector<BranchTurn> turns = {{1, 2}, {2, 1}, {0, 0}};
          EXPECT_EQ(worker.schedule(turns, 5), 5u);
          const std::vector<BranchStatus> all = worker.branches().branches;
          EXPECT_EQ(all[0].values, Values());
          EXPECT_EQ(all[1].values, own);
          EXPECT_EQ(all[2].values,
                    (Values{{"lr", 0.25}, {"beta1", 0.25}, {"rmsprop_momentum", 0.5}}));
          expect_error(ErrorCode::kInvalid, "states of the ranks", [&] { worker.kill(1); });
          expect_error(ErrorCode::kInvalid, "does not use it", [&] {
            worker.set_hyper({{"lr", 1}});
          });
          expect_error(ErrorCode::kInvalid, "groups are those of the ranks", [&] {
            worker.fork(0, {{"lr@1", 1}});
          });
          expect_error(ErrorCode::kInvalid, "must be at least 0", [&] {
            worker.fork(0, {{"lr", -1}});
          });
        }
        worker.barrier();
        for (uint64_t round = 1; round <= 10; ++round) {
          if (branches > 0) {
            EXPECT_EQ(worker.branch_in(round), round < 5 || round > 7 ? 0u : round < 7 ? 1u : 2u);
          }
          push(worker, round, 0, 1);
          if (r == 0) seen[branches].push_back(model_of(worker));
        }
      });
    }
    EXPECT_EQ(seen[0], seen[2]);
  }
}

TEST(Branches, JobsThatCannotHaveThemAreRefused) {
  Box box(2);
  const auto refused = [&](const char* words, const std::function<void(JobSpec&)>& change) {
    JobSpec spec = spec_of("refused", 1);
    spec.branches = 1;
    change(spec);
    expect_error(ErrorCode::kInvalid, words, [&] { Worker worker(box.options(spec)); });
  };
  refused("slack needs consistency ssp or async; this job is bsp",
          [](JobSpec& spec) { spec.hyper["slack"] = 1; });
  refused("states of the ranks, which change over together", [](JobSpec& spec) {
    spec.optimizer = "none";
    spec.consistency = "async";
    spec.hyper.clear();
  });
  for (const char* format : {"int8", "f32*100,topk"}) {
    refused("could not send of gradients of few bits", [format](JobSpec& spec) {
      spec.optimizer = "none";
      spec.keys.back().format = format;
      spec.hyper.clear();
    });
  }
  refused("batch: must be a whole number", [](JobSpec& spec) { spec.hyper["batch"] = 1.5; });
  refused("batch: it is what the ranks are told of a branch", [](JobSpec& spec) {
    spec.branches = 0;
    spec.hyper["batch"] = 8;
  });
  refused("branches: must be from 0 to 255", [](JobSpec& spec) { spec.branches = 256; });
  JobSpec sums = spec_of("sums", 1);
  sums.branches = 1;
  sums.optimizer = "none";
  sums.hyper.clear();
  JobSpec ahead = spec_of("slack", 1);
  ahead.branches = 1;
  ahead.consistency = "ssp";
  ahead.slack = 3;
  Worker slack(box.options(ahead));
  slack.wait_all();
  const auto of_fork = [&](const char* words, const Values& values) {
    expect_error(ErrorCode::kInvalid, words, [&] { slack.fork(0, values); });
  };
  of_fork("must be from 0 to 3", {{"slack", 4}});
  of_fork("a whole number of rounds, got 1.5", {{"slack", 1.5}});
  of_fork("same for all groups", {{"slack@0", 1}});
  EXPECT_EQ(slack.fork(0, {{"slack", 3}}).branch, 1u);
  Worker worker(box.options(spec_of("plain", 1)));
  expect_error(ErrorCode::kInvalid, "has no branches", [&] { worker.fork(0); });
  expect_error(ErrorCode::kInvalid, "has no branches", [&] { worker.branches(); });
}

// Whichever rank comes first. Where there are no checkpoints a saver does nothing.
TEST(Branches, NoRankSavesStatesOfBranches) {
  const TemporaryDirectory directory;
  Box box("pack:1 core:2 pu:1", uint64_t{1} << 33, {}, {.folder = directory.path()}), unsaved(2);
  JobSpec sums = spec_of("sums", 1);
  sums.branches = 1;
  sums.max_ranks = 2;
  sums.optimizer = "none";
  sums.hyper.clear();
  const auto join = [&sums](const Box& at, bool saves) {
    WorkerOptions options = at.options(sums);
    if (saves) options.saver = [](uint64_t) { return RankState{{"state", {}}}; };
    return std::make_unique<Worker>(options);
  };
  expect_error(ErrorCode::kInvalid, "leave out the saver", [&] { join(box, true); });
  const auto first = join(box, false);
  expect_error(ErrorCode::kInvalid, "leave out the saver", [&] { join(box, true); });
  const auto alone = join(unsaved, true);
}

}  // namespace branches_test
}  // namespace phub
