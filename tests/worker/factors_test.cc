// Matrices from factors: what every rank has is, bit for bit, what a loop of std::fma makes of all
// ranks' factors.
#include "worker/factors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace factors_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;

const std::vector<FactorMatrix> kMatrices = {
    {.name = "fc6", .rows = 130, .columns = 71, .samples = 5},
    {.name = "fc7", .rows = 1, .columns = 9000, .samples = 3},
    {.name = "fc8", .rows = 300, .columns = 2, .samples = 1},
};

JobSpec spec_of(const std::string& name, uint32_t ranks, uint32_t max_ranks = 0) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.max_ranks = max_ranks;
  spec.chunk_elements = 256;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.keys = {{.name = "bias", .elements = 40}};
  add_factor_keys(spec, kMatrices);
  return spec;
}

// What a rank has of a matrix in a round.
struct Sent {
  std::vector<float> left, right;
  uint32_t samples = 0;
};
Sent sent(uint64_t seed, uint32_t rank, uint64_t round, size_t matrix) {
  std::seed_seq from{seed, uint64_t{rank}, round, uint64_t{matrix}};
  std::mt19937 random(from);
  const FactorMatrix& m = kMatrices[matrix];
  Sent out{.left = std::vector<float>(m.samples * m.rows),
           .right = std::vector<float>(m.samples * m.columns),
           .samples = static_cast<uint32_t>(random() % (m.samples + 1))};
  std::normal_distribution<float> values;
  for (float& value : out.left) value = values(random);  // also of samples that are not sent
  for (float& value : out.right) value = values(random);
  return out;
}

std::vector<float> alone(uint64_t seed, const std::vector<uint32_t>& ranks, uint64_t round,
                         size_t matrix, uint64_t& samples) {
  const FactorMatrix& m = kMatrices[matrix];
  std::vector<float> gradient(m.rows * m.columns, 0.25f);
  samples = 0;
  for (const uint32_t rank : ranks) {
    const Sent from = sent(seed, rank, round, matrix);
    samples += from.samples;
    for (uint32_t s = 0; s < from.samples; ++s) {
      for (uint64_t i = 0; i < m.rows; ++i) {
        for (uint64_t j = 0; j < m.columns; ++j) {
          float& at = gradient[i * m.columns + j];
          at = std::fma(from.left[s * m.rows + i], from.right[s * m.columns + j], at);
        }
      }
    }
  }
  return gradient;
}

void train_round(uint64_t seed, Worker& worker, Factors& factors, uint64_t round,
                 const std::vector<uint32_t>& ranks) {
  worker.push_null(worker.key("bias"));
  for (size_t matrix = 0; matrix < kMatrices.size(); ++matrix) {
    const Sent mine = sent(seed, worker.rank(), round, matrix);
    std::ranges::copy(mine.left, factors.left(matrix).begin());
    std::ranges::copy(mine.right, factors.right(matrix).begin());
    factors.push(matrix, mine.samples);
  }
  for (size_t matrix = kMatrices.size(); matrix-- > 0;) {
    const FactorMatrix& m = kMatrices[matrix];
    std::vector<float> gradient(m.rows * m.columns, 0.25f);
    uint64_t expected_samples = 0;
    const std::vector<float> expected = alone(seed, ranks, round, matrix, expected_samples);
    EXPECT_EQ(factors.wait(matrix, gradient.data()), expected_samples);
    for (size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(gradient[i]), std::bit_cast<uint32_t>(expected[i]))
          << m.name << ", element " << i << ", rank " << worker.rank() << ", round " << round;
    }
  }
  worker.wait(worker.key("bias"));
}

TEST(Factors, EveryRankHasTheProductsOfAll) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  for (const char* transport : {"shm", "tcp"}) {
    Box box(2);
    each_rank(3, [&](uint32_t rank) {
      WorkerOptions options = box.options(spec_of("job", 3), rank);
      options.transport = transport;
      Worker worker(options);
      worker.wait_all();
      Factors factors(worker, kMatrices);
      for (uint64_t round = 1; round <= 5; ++round) {
        ASSERT_NO_FATAL_FAILURE(train_round(seed, worker, factors, round, {0, 1, 2}));
      }
      worker.barrier();
    });
  }
}

TEST(Factors, WhoHasLeftHasNoSamples) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  Box box(2);
  std::vector<std::unique_ptr<Worker>> workers(3);
  std::vector<std::unique_ptr<Factors>> factors(3);
  const auto join = [&](uint32_t rank) {
    WorkerOptions options = box.options(spec_of("job", 2, 3), rank);
    options.await_ranks = false;
    workers[rank] = std::make_unique<Worker>(options);
    factors[rank] = std::make_unique<Factors>(*workers[rank], kMatrices);
  };
  const auto train = [&](uint64_t round, const std::vector<uint32_t>& ranks) {
    each_rank(static_cast<uint32_t>(ranks.size()), [&](uint32_t i) {
      workers[ranks[i]]->wait_all();
      train_round(seed, *workers[ranks[i]], *factors[ranks[i]], round, ranks);
    });
  };
  join(0), join(1);
  train(1, {0, 1});
  workers[0]->leave();
  train(2, {1});
  join(2);
  ASSERT_EQ(workers[2]->first_round(), 3u);
  train(3, {1, 2});
}

TEST(Factors, WhatCannotBeIsRefused) {
  Box box(1);
  const auto refused = [](const std::string& what, const auto& change) {
    JobSpec spec;
    std::vector<FactorMatrix> matrices = kMatrices;
    change(spec, matrices.front());
    expect_error(ErrorCode::kInvalid, what, [&] { add_factor_keys(spec, matrices); });
  };
  refused("and has sgd, sum and bsp", [](JobSpec& spec, auto&) { spec.optimizer = "sgd"; });
  refused("and has none, mean and bsp", [](JobSpec& spec, auto&) { spec.reduction = "mean"; });
  refused("and has none, sum and async", [](JobSpec& spec, auto&) { spec.consistency = "async"; });
  refused("cannot have a grad_scale", [](JobSpec& spec, auto&) { spec.hyper["grad_scale"] = 2; });
  refused("cannot have a grad_scale", [](JobSpec& spec, auto&) {
    spec.schedule = {{3, {{"grad_scale", 2}}}};
  });
  refused("and has bf16 and stop", [](JobSpec& spec, auto&) { spec.parameter_dtype = "bf16"; });
  refused("and has f32 and exclude", [](JobSpec& spec, auto&) { spec.on_nonfinite = "exclude"; });
  refused("16777217 samples of 1 x 1 are none, or too many", [](JobSpec&, FactorMatrix& m) {
    m.rows = m.columns = 1;
    m.samples = (1 << 24) + 1;
  });
  refused("factors of 'fc6': 0 samples of 130 x 71",
          [](JobSpec&, FactorMatrix& m) { m.samples = 0; });
  refused("factors of 'fc6': 5 samples of 130 x 0",
          [](JobSpec&, FactorMatrix& m) { m.columns = 0; });
  refused("are none, or too many", [](JobSpec&, FactorMatrix& m) {
    m.rows = m.columns = std::numeric_limits<uint64_t>::max();
  });

  WorkerOptions options = box.options(spec_of("job", 1));
  options.rank = 0;
  Worker worker(options);
  worker.wait_all();
  Factors factors(worker, kMatrices);
  expect_error(ErrorCode::kInvalid, "factors of 'fc8': 2 samples, and there is room for 1",
               [&] { factors.push(2, 2); });
  std::vector<FactorMatrix> others = kMatrices;
  others[1].samples = 4;
  expect_error(ErrorCode::kMismatch,
               "key 'fc7/factors/0' has 27004 elements, and the factors 36005",
               [&] { const Factors wrong(worker, others); });
  others[0].name = "fc5";
  expect_error(ErrorCode::kNotFound, "fc5/factors/0", [&] { const Factors wrong(worker, others); });
  // A rank that lies about its samples.
  const size_t key = worker.key("fc8/factors/0");
  for (const float count : {-1.0f, 1.5f, 2.0f, std::numeric_limits<float>::infinity()}) {
    worker.gradient(key).back() = count;
    if (!std::isfinite(count)) continue;  // the job would end
    worker.push(key);
    std::vector<float> gradient(600);
    expect_error(ErrorCode::kInvalid, "key 'fc8/factors/0' has factors of",
                 [&] { factors.wait(2, gradient.data()); });
  }
}

}  // namespace factors_test
}  // namespace phub
