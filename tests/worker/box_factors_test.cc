// Matrices whose factors the box adds up: how they are cut, and what is refused (any_job_test: what
// every rank has of them is what one process computes alone).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"

namespace phub {
namespace box_factors_test {

using testing::alone;
using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;
using testing::results_of;

KeySpec matrix(const std::string& name, uint64_t rows, uint64_t columns, uint32_t rank_limit,
               uint32_t tile_rows = 0) {
  return {.name = name,
          .elements = rows * columns,
          .shape = {rows, columns},
          .format = "factors",
          .rank_limit = rank_limit,
          .tile_rows = tile_rows};
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec = grouped_spec(name, ranks, "");
  spec.keys[0].elements = 500;
  spec.keys.push_back(matrix("wide", 5, 1000, 3, 4));
  spec.keys.push_back(matrix("tall", 300, 2, 1, 48));
  spec.keys.push_back(matrix("odd", 67, 33, 4, 32));
  spec.keys.push_back(matrix("row", 1, 40, 2, 1));
  return spec;
}

// The rows of a chunk are the server's to choose: as many chunks as it has cores.
TEST(BoxFactors, AMatrixHasAsManyChunksAsThereAreCores) {
  Box box(2);
  JobSpec spec = spec_of("tiles", 2);
  for (KeySpec& key : spec.keys) key.tile_rows = 0;
  GroupedTraining run{.spec = spec, .seed = 3};
  std::vector<std::vector<Results>> seen(2);
  size_t cores = 0;  // of all boxes
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.wait_all();
    if (rank == 0) {
      run.spec = worker.spec();
      cores = box.status().jobs.at(0).cores.size();
    }
    worker.barrier();
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      train_round(run, worker, rank, round);
      seen[rank].push_back(results_of(worker));
    }
    worker.barrier();
  });
  const std::vector<Results> want = alone(run, run.spec, box.log("tiles"));
  EXPECT_TRUE(seen[0] == want);
  EXPECT_TRUE(seen[1] == want);
  for (size_t key = 2; key < run.spec.keys.size(); ++key) {
    const KeySpec& of = run.spec.keys[key];
    ASSERT_GT(of.tile_rows, 0u) << of.name;
    EXPECT_EQ(of.tile_rows % rows_together(of) == 0 || of.tile_rows == of.shape[0], true);
    EXPECT_EQ(of.tile_rows, tile_rows_for(of, cores, spec.chunk_elements)) << of.name;
  }
}

// A pair of a rank counts once its key is pushed again; and in SSP at once.
TEST(BoxFactors, OutOfLockStepEachPushIsAStep) {
  Box box(2);
  for (const char* consistency : {"ssp", "async"}) {
    JobSpec spec;
    spec.name = consistency;
    spec.consistency = consistency;
    if (spec.consistency == "ssp") spec.slack = 2;
    spec.optimizer = "sgd";
    spec.hyper["lr"] = 1;
    spec.world_size = 1;
    spec.keys = {matrix("m", 40, 70, 2)};
    WorkerOptions options = box.options(spec);
    options.rank = 0;
    Worker worker(options);
    worker.wait_all();
    std::vector<float> left(80), right(140), want(2800);
    std::mt19937 random(7);
    for (uint64_t round = 1; round <= 4; ++round) {
      for (float& x : left) x = static_cast<float>(random() % 9) - 4;
      for (float& x : right) x = static_cast<float>(random() % 9) - 4;
      worker.push_factors(0, {left.data(), right.data(), 2});
      worker.wait(0);
      for (size_t i = 0; i < want.size(); ++i) {
        want[i] -= std::fma(left[40 + i / 70], right[70 + i % 70], left[i / 70] * right[i % 70]);
      }
    }
    // The last push's step may not be in what it got; one without pairs looks.
    worker.push_null(0);
    worker.wait(0);
    EXPECT_TRUE(std::ranges::equal(worker.parameters(0), want)) << consistency;
  }
}

TEST(BoxFactors, WhatCannotBeIsRefused) {
  const auto refused = [](const std::string& what, const auto& change) {
    JobSpec spec;
    spec.name = "refused";
    spec.keys = {matrix("m", 100, 33, 4)};
    change(spec, spec.keys[0]);
    expect_error(ErrorCode::kInvalid, what, [&] { validate(spec); });
  };
  refused("keys[0].rank_limit: must be from 1 to 1048575 for format factors, got 0",
          [](JobSpec&, KeySpec& key) { key.rank_limit = 0; });
  refused("keys[0].rank_limit: must be from 1 to 1048575, got 1048576",
          [](JobSpec&, KeySpec& key) { key.rank_limit = 1 << 20; });
  refused("keys[0].rank_limit: needs format 'factors', got 'int8'",
          [](JobSpec&, KeySpec& key) { key.format = "int8"; });
  refused("needs the shape of a matrix, [rows, columns], got []",
          [](JobSpec&, KeySpec& key) { key.shape.clear(); });
  refused("needs the shape of a matrix, [rows, columns], got [10, 10, 33]",
          [](JobSpec&, KeySpec& key) {
            key.shape = {10, 10, 33};
          });
  refused("keys[0].shape[1]: must be from 1 to 1048575, got 1048576",
          [](JobSpec&, KeySpec& key) { key = matrix("m", 1, 1 << 20, 1); });
  refused(
      "keys[0].rank_limit: 1000 pairs of vectors for 32 rows of 524289 columns are more than "
      "a chunk may have, which is 16777216 elements",
      [](JobSpec&, KeySpec& key) { key = matrix("m", 100, (1 << 19) + 1, 1000); });
  refused("keys[0].tile_rows: must be a multiple of 32 and at most 100, got 33",
          [](JobSpec&, KeySpec& key) { key.tile_rows = 33; });
  refused("keys[0].tile_rows: must be a multiple of 32 and at most 100, got 128",
          [](JobSpec&, KeySpec& key) { key.tile_rows = 128; });
  refused("gradient_dtype: must be",
          [](JobSpec& spec, KeySpec&) { spec.gradient_dtype = "factors"; });

  Box box(1);
  JobSpec spec = spec_of("job", 1);
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  worker.wait_all();
  const size_t key = worker.key("odd");
  const std::vector<float> left(67 * 5, 1.0f), right(33 * 5, 1.0f);
  expect_error(ErrorCode::kInvalid, "push_factors: 5 pairs for key 'odd', whose rank_limit is 4",
               [&] {
                 worker.push_factors(key, {left.data(), right.data(), 5});
               });
  expect_error(ErrorCode::kInvalid, "push_factors: 1 pairs of key 'odd' are null", [&] {
    worker.push_factors(key, {left.data(), nullptr, 1});
  });
  expect_error(ErrorCode::kInvalid, "the gradient of key 'b' is sent as it is", [&] {
    worker.push_factors(1, {left.data(), right.data(), 1});
  });
  expect_error(ErrorCode::kInvalid, "the factors of key 'odd' are sent: use push_factors()",
               [&] { worker.push(key); });
  expect_error(ErrorCode::kInvalid, "key 'odd' has no memory for its gradient",
               [&] { worker.gradient(key); });
  expect_error(ErrorCode::kInvalid, "key 'odd' can have no memory for its gradient",
               [&] { worker.register_memory(key, {.gradient = left.data()}); });
  worker.push_factors(key, {left.data(), right.data(), 4});
  worker.wait(key);
  EXPECT_EQ(worker.parameters(key)[66 * 33], 4.0f);

  JobSpec other = spec;
  other.keys[4].rank_limit = 3;
  other.keys[2].tile_rows = 0;  // as the job has it
  WorkerOptions second = box.options(other);
  expect_error(ErrorCode::kMismatch, "key 4 'odd': rank_limit is 3 here and 4 in the job",
               [&] { const Worker wrong(second); });
}

}  // namespace box_factors_test
}  // namespace phub
