// Gradients and differences in coded formats: residuals belong to a rank (any_job_test: whatever a
// round does, ranks have what one process computes alone).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/slots.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "worker/memory/gradient_coder.h"

namespace phub {
namespace coded_test {

using testing::alone;
using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;
using testing::results_of;

// Whole numbers, added in multiples of the largest power of two that a rank's chunk has, whatever
// the order: the gradients of the ranks are of different magnitudes.
TEST(Coded, Int32IsTheSumOfWholeNumbers) {
  constexpr uint32_t kRanks = 3, kElements = 3000, kChunk = 1024, kRounds = 6;
  const auto seeds = testing::fresh_seeds(1);
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seeds.first));
  Box box(2);
  JobSpec spec;
  spec.name = "whole";
  spec.keys = {{.name = "w", .elements = kElements, .format = "int32"}};
  spec.world_size = kRanks;
  spec.chunk_elements = kChunk;
  const auto gradient_of = [&](uint32_t rank, uint32_t round) {
    std::mt19937_64 random(seeds.first + kRanks * round + rank);
    std::vector<float> gradient(kElements);
    for (uint32_t i = 0; i < kElements; ++i) {
      const int exponent = static_cast<int>((rank * 7 + round * 5 + i / kChunk * 11) % 30) - 15;
      const auto number = static_cast<int32_t>(random());
      gradient[i] = std::ldexp(static_cast<float>(number), exponent - 31);
    }
    return gradient;
  };
  std::vector<std::vector<float>> seen(kRounds);
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.wait_all();
    for (uint32_t round = 0; round < kRounds; ++round) {
      std::ranges::copy(gradient_of(rank, round), worker.gradient(0).begin());
      worker.push_pull(0);
      if (rank == 0) seen[round].assign(worker.parameters(0).begin(), worker.parameters(0).end());
    }
    worker.barrier();
  });
  std::vector<std::vector<float>> residuals(kRanks, std::vector<float>(kElements));
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (uint32_t first = 0; first < kElements; first += kChunk) {
      const uint32_t n = std::min(kChunk, kElements - first);
      std::vector<std::vector<std::byte>> slots;
      std::vector<const void*> pointers;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const std::vector<float> gradient = gradient_of(rank, round);
        slots.emplace_back(kernels::slot_bytes(kernels::DType::kInt32, n));
        reference::encode(std::span(gradient).subspan(first, n),
                          std::span(residuals[rank]).subspan(first, n), kernels::DType::kInt32, {},
                          slots.back().data());
      }
      for (const auto& slot : slots) pointers.push_back(slot.data());
      std::vector<float> want(n);
      ASSERT_TRUE(reference::sum_coded(pointers, kernels::DType::kInt32, 1.0f, want.data(), n));
      EXPECT_TRUE(std::equal(want.begin(), want.end(), seen[round].begin() + first))
          << "round " << round << ", elements from " << first;
    }
  }
}

// One worker after another has rank 1: it leaves, or is replaced.
TEST(Coded, WhoTakesOverARankBeginsWithoutResiduals) {
  Box box(2);
  for (const bool replaced : {false, true}) {
    GroupedTraining run{
        .spec = grouped_spec(replaced ? "replaced" : "left", 2, ""), .seed = 11, .rounds = 6};
    SCOPED_TRACE(run.spec.name);
    run.spec.keys[0].format = "int4";
    run.spec.keys[1].format = "topk";
    run.spec.optimizer = "momentum";
    const auto join = [&](uint32_t rank, bool replace) {
      WorkerOptions options = box.options(run.spec);
      options.rank = static_cast<int32_t>(rank);
      options.replace = replace;
      options.await_ranks = false;
      return std::make_unique<Worker>(options);
    };
    std::vector<std::unique_ptr<Worker>> workers;
    for (uint32_t rank = 0; rank < 2; ++rank) workers.push_back(join(rank, false));
    std::vector<Results> seen;
    const auto train_together = [&](uint64_t first, uint64_t last) {
      each_rank(2, [&](uint32_t rank) {
        workers[rank]->wait_all();
        for (uint64_t round = first; round <= last; ++round) {
          train_round(run, *workers[rank], rank, round);
          if (rank == 0) seen.push_back(results_of(*workers[0]));
        }
      });
    };
    train_together(1, 3);
    if (!replaced) workers[1]->leave();
    workers[1] = join(1, replaced);
    ASSERT_EQ(workers[1]->first_round(), 4u);
    train_together(4, run.rounds);
    const std::vector<Results> want = alone(run, run.spec, box.log(run.spec.name));
    for (size_t i = 0; i < run.rounds; ++i) {
      EXPECT_TRUE(seen[i] == want[i]) << "round " << i + 1;
    }
    workers.clear();
    EXPECT_TRUE(box.becomes_empty());
  }
}

// Who comes later gets what the others have, not the parameters.
TEST(Differences, WhoJoinsLaterHasWhatTheOthersHave) {
  for (const char* transport : {"shm", "tcp"}) {
    Box box(2);
    GroupedTraining run{.spec = grouped_spec("joins", 1, ""), .seed = 5, .rounds = 7};
    run.spec.max_ranks = 2;
    run.spec.parameter_dtype = "int4";
    run.spec.optimizer = "adam";
    const auto join = [&](uint32_t rank) {
      WorkerOptions options = box.options(run.spec);
      options.rank = static_cast<int32_t>(rank);
      options.transport = transport;
      return std::make_unique<Worker>(options);
    };
    const auto first = join(0);
    first->wait_all();
    for (uint64_t round = 1; round <= 3; ++round) train_round(run, *first, 0, round);
    const auto second = join(1);
    ASSERT_EQ(second->first_round(), 4u);
    second->wait_all();
    EXPECT_TRUE(results_of(*second) == results_of(*first));
    std::vector<Results> seen[2];
    each_rank(2, [&](uint32_t rank) {
      Worker& worker = rank == 0 ? *first : *second;
      for (uint64_t round = 4; round <= run.rounds; ++round) {
        train_round(run, worker, rank, round);
        seen[rank].push_back(results_of(worker));
      }
    });
    const std::vector<Results> want = alone(run, run.spec, box.log(run.spec.name));
    for (size_t i = 0; i < seen[0].size(); ++i) {
      EXPECT_TRUE(seen[0][i] == want[i + 3]) << "round " << i + 4;
      EXPECT_TRUE(seen[1][i] == want[i + 3]) << "round " << i + 4;
    }
  }
}

TEST(Differences, ParametersThatTheyCannotBeOfAreRefused) {
  Box box(1);
  const auto refused = [&](const std::string& what, const auto& change) {
    WorkerOptions options = box.options(grouped_spec("refused", 1, ""));
    options.rank = 0;
    options.spec.optimizer = "sgd";
    options.spec.parameter_dtype = "int8";
    change(options.spec);
    expect_error(ErrorCode::kInvalid, what, [&] { const Worker worker(options); });
  };
  refused("parameter_dtype 'int8': it is about the steps of the server's optimizer",
          [](JobSpec& spec) { spec.optimizer = "none"; });
  refused("parameter_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int8, int4, got",
          [](JobSpec& spec) { spec.parameter_dtype = "topk"; });
}

TEST(GradientCoder, RestoresWhatItSavedAndNothingElse) {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.keys = {{.name = "a", .elements = 33, .format = "int4"},
                     {.name = "b", .elements = 1000},
                     {.name = "c", .elements = 5, .format = "topk"}};
  GradientCoder coder(reply);
  EXPECT_TRUE(coder.codes(0) && !coder.codes(1) && coder.codes(2));
  EXPECT_EQ(coder.gradient(0).size(), 33u);
  EXPECT_EQ(coder.residual_bytes(), 38 * sizeof(float));
  EXPECT_EQ(coder.residuals(), std::vector<std::byte>(coder.residual_bytes()));
  std::vector<std::byte> saved(coder.residual_bytes());
  for (size_t i = 0; i < saved.size(); ++i) saved[i] = static_cast<std::byte>(i);
  coder.restore(saved);
  EXPECT_EQ(coder.residuals(), saved);
  for (const size_t bytes : {size_t{0}, saved.size() - 4, saved.size() + 4, size_t{1033 * 4}}) {
    expect_error(
        ErrorCode::kInvalid,
        fmt::format("the saved residuals of this rank have {} bytes, and its keys 152", bytes),
        [&] { coder.restore(std::vector<std::byte>(bytes)); });
  }
  EXPECT_EQ(coder.residuals(), saved);
}

}  // namespace coded_test
}  // namespace phub
