// Ranks that write and read some chunks only: only what is touched travels, nobody waits for
// others, and what is left alone follows (rack_sim: what each reads is what a dense job gives).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/hyper.h"
#include "tests/oracle/reference.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace interest_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;

constexpr uint64_t kChunk = 64;

// By rank and key.
using Interests = std::vector<std::vector<KeyInterest>>;

struct Training {
  JobSpec spec;
  Interests interests;
  uint64_t seed = 1;
  uint64_t rounds = 6;

  bool takes_part(uint32_t rank, size_t key) const {
    const auto interest =
        std::ranges::find(interests[rank], spec.keys[key].name, &KeyInterest::key);
    return interest == interests[rank].end() || !interest->writes.empty() ||
           !interest->reads.empty();
  }
  bool is_null(uint32_t rank, uint64_t round, size_t key) const {
    return (seed + rank * 5 + round * 3 + key) % 6 == 0;
  }
  float gradient(uint32_t rank, uint64_t round, size_t key, uint64_t element) const {
    uint64_t hash = seed * 0x9e3779b97f4a7c15 + rank * 1'000'003 + round * 7919 + key * 104'729;
    hash = (hash ^ element) * 0xbf58476d1ce4e5b9;
    return static_cast<float>(static_cast<double>(hash >> 40) * 0x1p-23 - 1);
  }
};

void train_round(const Training& run, Worker& worker, uint64_t round) {
  for (size_t key = 0; key < worker.keys(); ++key) {
    if (!run.takes_part(worker.rank(), key)) continue;
    const std::span<float> gradient = worker.gradient(key);
    for (uint64_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = run.gradient(worker.rank(), round, key, i);
    }
    worker.push(key, {.null = run.is_null(worker.rank(), round, key)});
  }
  worker.wait_all();
}

WorkerOptions options_for(const Box& box, const Training& run, uint32_t rank) {
  WorkerOptions options = box.options(run.spec, rank);
  options.interest = run.interests[rank];
  return options;
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.chunk_elements = kChunk;
  spec.keys = {{"a", 1000}, {"b", 64}, {"c", 333}};
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.1}, {"weight_decay", 0.05}};
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  return spec;
}

// A chunk's gradient comes from its writers, and its result goes to its readers.
TEST(Interest, OnlyWhatIsTouchedTravels) {
  Box box(2);
  JobSpec spec = spec_of("bytes", 2);
  spec.keys = {{"t", 20 * kChunk}};
  const Interests interests = {{{"t", {{10, 11}, {5 * kChunk, 7 * kChunk}}, {}}},   // 3 chunks
                               {{"t", {{0, 1}}, {{6 * kChunk, 6 * kChunk + 1}}}}};  // 1; 1
  const auto flow = [&] { return box.status().jobs.at(0).flow; };
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    options.interest = interests[rank];
    Worker worker(options);
    worker.wait_all();
    for (int round = 0; round < 3; ++round) worker.push_pull(0);
    EXPECT_EQ(worker.stats().chunks_pushed, 3 * (rank == 0 ? 3u : 2u));
    worker.barrier();
    if (rank == 1) return worker.barrier();
    // Initial parameters, and three rounds.
    constexpr uint64_t kBytes = kChunk * sizeof(float), kIn = 3 * (3 + 1) * kBytes,
                       kOut = (1 + 3) * kBytes;
    for (int tries = 0; tries < 600 && (flow().bytes_in < kIn || flow().bytes_out < kOut);
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is counted now and then
    }
    EXPECT_EQ(flow().bytes_in, kIn);
    EXPECT_EQ(flow().bytes_out, kOut);
    worker.barrier();
  });
}

// What a rank reads stays until it says that it has read it.
TEST(Interest, AReaderLosesNoResult) {
  Box box(2);
  JobSpec spec = spec_of("reader", 2);
  spec.optimizer = "none";
  spec.hyper.clear();
  spec.keys = {{"t", 3 * kChunk}};
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    if (rank == 1) options.interest = {{"t", {}, {{kChunk, 2 * kChunk}}}};
    Worker worker(options);
    worker.wait_all();
    const std::span<const float> mine = worker.parameters(0).subspan(kChunk, kChunk);
    const auto all_are = [&](float value) {
      return std::ranges::all_of(mine, [value](float x) { return x == value; });
    };
    for (int round = 1; round <= 5; ++round) {
      const auto value = static_cast<float>(round);
      if (rank == 0) std::ranges::fill(worker.gradient(0), value);
      // The reader comes when the writer waits for it, and what it reads is still that of before.
      if (rank == 1) {
        while (box.status().jobs.at(0).waiting_for != std::vector<uint32_t>{1}) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        EXPECT_TRUE(all_are(value - 1)) << round;
        worker.push(0);  // whatever is in its gradient: it does not write
      } else {
        worker.push(0);
      }
      worker.wait(0);
      EXPECT_TRUE(all_are(value)) << round;
      worker.barrier();
    }
  });
}

TEST(Interest, NobodyWaitsForARankThatIsNotConcerned) {
  Box box(2);
  JobSpec spec = spec_of("apart", 2);
  spec.keys = {{"mine", 100}, {"yours", 100}};
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    options.interest = {{rank == 0 ? "yours" : "mine", {}, {}}};
    Worker worker(options);
    worker.wait_all();
    if (rank == 0) {
      for (int round = 0; round < 300; ++round) worker.push_pull(0);
      EXPECT_EQ(worker.round(0), 300u);
      expect_error(ErrorCode::kInvalid,
                   "key 'yours' was pushed, and this rank joined with the interest to neither "
                   "write nor read it",
                   [&] { worker.push(1); });
    }
    worker.barrier();
    if (rank == 1) {
      worker.push_pull(1);
      EXPECT_EQ(worker.round(1), 1u);
    }
    worker.barrier();
  });
}

// The steps of rounds in which nobody is concerned are made when somebody is to read them.
TEST(Interest, WhatNobodyTouchesFollows) {
  Box box(2);
  Training run{.spec = spec_of("follows", 2)};
  run.spec.keys = {{"busy", 200}, {"left", 200}};
  run.spec.optimizer = "adam";
  run.interests = {{{"left", {}, {}}}, {}};
  run.rounds = 40;
  for (uint64_t seed = 1; seed < 100; ++seed) {  // one in which "left" has gradients
    run.seed = seed;
    if (!run.is_null(1, 1, 1)) break;
  }
  Worker stays([&] {
    WorkerOptions options = options_for(box, run, 0);
    options.await_ranks = false;
    return options;
  }());
  const auto train_both = [&](Worker& other, uint64_t first, uint64_t last) {
    std::thread beside([&] {
      for (uint64_t round = first; round <= last; ++round) train_round(run, stays, round);
    });
    for (uint64_t round = first; round <= last; ++round) train_round(run, other, round);
    beside.join();
  };
  {
    Worker leaves(options_for(box, run, 1));
    train_both(leaves, 1, 3);
    leaves.leave();
  }
  for (uint64_t round = 4; round <= 30; ++round) train_round(run, stays, round);
  Worker comes(options_for(box, run, 1));
  comes.wait_all();
  ASSERT_EQ(comes.first_round(), 31u);

  // The reference has rank 1's gradients in rounds 1 to 3, and none of "left" from then on.
  Training until = run;
  until.rounds = 3;
  kernels::Hyper hyper = kernels::default_hyper(kernels::Optimizer::kAdam);
  hyper.lr = run.spec.hyper.at("lr");
  hyper.weight_decay = run.spec.hyper.at("weight_decay");
  reference::Model model(kernels::Optimizer::kAdam, hyper, std::vector<float>(200));
  for (uint64_t round = 1; round <= 30; ++round) {
    std::vector<float> gradient(200);
    const bool sends = round <= 3 && !run.is_null(1, round, 1);
    for (uint64_t i = 0; i < 200 && sends; ++i) gradient[i] = run.gradient(1, round, 1, i);
    const void* slot = gradient.data();
    model.round(std::span(&slot, sends ? 1 : 0), kernels::DType::kF32, 1);
  }
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(comes.parameters(1)),
                                 std::as_bytes(std::span(model.params))));
  train_both(comes, 31, 33);
}

TEST(Interest, InitialParametersComeFromARankThatTouchesNothingElse) {
  Box box(2);
  JobSpec spec = spec_of("initial", 2);
  spec.optimizer = "sgd";
  spec.initial = "broadcast";
  std::vector<float> initial(1000 + 64 + 333);
  for (size_t i = 0; i < initial.size(); ++i) initial[i] = static_cast<float>(i);
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    if (rank == 0) options.interest = {{"a", {}, {}}, {"b", {}, {}}, {"c", {{0, 5}}, {}}};
    Worker worker(options);
    worker.broadcast(rank == 0 ? initial : std::vector<float>());
    if (rank == 1) {
      EXPECT_TRUE(std::ranges::equal(worker.parameters(0), std::span(initial).first(1000)));
      EXPECT_TRUE(std::ranges::equal(worker.parameters(2), std::span(initial).last(333)));
    }
    worker.barrier();
  });
}

TEST(Interest, AnInterestThatCannotBeIsRefused) {
  Box box(1);
  const auto refused = [&](
                           const std::string& what, const std::vector<KeyInterest>& interest,
                           const std::function<void(JobSpec & spec)>& change = [](JobSpec&) {}) {
    JobSpec spec = spec_of("refused", 1);
    change(spec);
    WorkerOptions options = box.options(spec);
    options.interest = interest;
    expect_error(ErrorCode::kInvalid, what, [&] { const Worker worker(options); });
    // Nor does the server believe it.
    expect_error(ErrorCode::kInvalid, what, [&] { check_interest(interest, spec); });
  };
  refused("interest: job 'refused' has no key 'd'", {{"d", {}, {}}});
  refused("interest: key 'a' is there twice", {{"a", {}, {}}, {"a", {}, {}}});
  refused("interest in key 'a': writes has the range from 7 up to, and without, 7; it must not be",
          {{"a", {{7, 7}}, {}}});
  refused(
      "reads has the range from 999 up to, and without, 1001; it must not be empty, and the "
      "key has 1000 elements",
      {{"a", {}, {{999, 1001}}}});
  refused("writes has the range from 9 up to, and without, 3", {{"a", {{9, 3}}, {}}});
  refused("interest in key 'b': reads has 65537 ranges, more than 65536",
          {{"b", {}, std::vector<ElementRange>(65'537, {0, 1})}});
  refused("interest: this rank neither writes nor reads any key of job 'refused'",
          {{"a", {}, {}}, {"b", {}, {}}, {"c", {}, {}}});
  refused("interest: it needs rounds that all ranks make together", {{"a", {}, {}}},
          [](JobSpec& spec) { spec.consistency = "ssp"; });
}

// A job that goes on from a checkpoint, of which a key was left alone, is the one without a break.
TEST(SavedInterest, GoesOnToTheBit) {
  const TemporaryDirectory directory = TemporaryDirectory::in_memory();
  std::optional<testing::ServerProcess> server;
  const auto serve = [&](const std::string& topology) {
    const std::string listen = server ? server->address() : "127.0.0.1:0";
    server.emplace(PHUB_BINARY,
                   std::vector<std::string>{"--checkpoints", directory.path() + "/checkpoints",
                                            "--checkpoint-every", "1000000"},
                   listen, topology);
  };
  Training run{.spec = spec_of("saved", 1)};
  run.interests = {{{"b", {}, {}}, {"c", {{0, 100}}, {{0, 333}}}}};
  const auto join = [&](const JobSpec& spec, const std::vector<KeyInterest>& interest) {
    WorkerOptions options = server->options(spec);
    options.rank = 0;
    options.interest = interest;
    auto worker = std::make_unique<Worker>(options);
    worker->wait_all();
    return worker;
  };
  const auto train = [&](Worker& worker, uint64_t first, uint64_t last) {
    for (uint64_t round = first; round <= last; ++round) train_round(run, worker, round);
  };
  serve("pack:1 core:2 pu:1");
  {
    const auto all = join(run.spec, {});
    for (size_t key = 0; key < 3; ++key) {
      std::ranges::fill(all->gradient(key), 1.0f);
      all->push(key);
    }
    all->wait_all();
    all->await_checkpoint(all->checkpoint(), 60'000);
    EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
  }
  serve("pack:1 core:3 pu:1");
  {
    auto some = join(run.spec, run.interests[0]);
    ASSERT_EQ(some->first_round(), 2u);
    train(*some, 2, 5);
    some->await_checkpoint(some->checkpoint(), 60'000);
    EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
    serve("pack:1 core:3 pu:1");
    expect_error(ErrorCode::kRewound, "", [&] {
      for (;;) some->push_pull(0);
    });
    some = some->rejoin();  // with the same interest
    some->wait_all();
    ASSERT_EQ(some->first_round(), 6u);
    expect_error(ErrorCode::kInvalid, "neither write nor read", [&] { some->push(1); });
    train(*some, 6, 9);
    some->await_checkpoint(some->checkpoint(), 60'000);
    EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
  }
  serve("pack:1 core:1 pu:1");
  const auto last = join(run.spec, {});
  ASSERT_EQ(last->first_round(), 10u);
  // Key "b" has momentum from round 1, and weight decay.
  kernels::Hyper hyper = kernels::default_hyper(kernels::Optimizer::kMomentum);
  hyper.lr = run.spec.hyper.at("lr");
  hyper.weight_decay = run.spec.hyper.at("weight_decay");
  reference::Model model(kernels::Optimizer::kMomentum, hyper, std::vector<float>(64));
  for (uint64_t round = 1; round <= 9; ++round) {
    const std::vector<float> gradient(64, 1.0f);
    const void* slot = gradient.data();
    model.round(std::span(&slot, round == 1 ? 1 : 0), kernels::DType::kF32, 1);
  }
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(last->parameters(1)),
                                 std::as_bytes(std::span(model.params))));
}

}  // namespace interest_test
}  // namespace phub
