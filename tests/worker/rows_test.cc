// Keys of whose gradients the rows are sent that are not zero: what every rank gets is what a job
// gives whose rows are keys with null gradients (any_job_test: what one process computes alone).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace rows_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::results_of;

KeySpec table(const std::string& name, uint64_t rows, uint64_t columns, uint32_t rows_limit,
              uint32_t tile_rows = 0, bool lazy = false) {
  return {.name = name,
          .elements = rows * columns,
          .shape = {rows, columns},
          .format = "rows",
          .rows_limit = rows_limit,
          .lazy = lazy,
          .tile_rows = tile_rows};
}

KeySpec matrix(const std::string& name, uint64_t rows, uint64_t columns, uint32_t rank_limit) {
  return {.name = name,
          .elements = rows * columns,
          .shape = {rows, columns},
          .format = "factors",
          .rank_limit = rank_limit};
}

// A job in which each row is a key of its own, and null where it is not sent.
TEST(Rows, AreAsKeysWithNullGradients) {
  const auto seeds = testing::fresh_seeds(4);
  constexpr uint32_t kRanks = 3;
  Box box(2);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const char* const kOptimizers[] = {"none", "sgd", "momentum", "adam"};
    GroupedTraining run{.spec = grouped_spec(fmt::format("rows{}", seed), kRanks, ""),
                        .seed = seed % 1000};
    run.spec.optimizer = kOptimizers[seed % 4];
    run.spec.keys = {table("t", 50, 19, 30, 32)};
    const auto seen = train(run, [&](uint32_t) { return box.options(run.spec); });

    JobSpec dense = run.spec;
    dense.name += "-dense";
    dense.keys.clear();
    for (size_t row = 0; row < 50; ++row) {
      dense.keys.push_back({.name = std::to_string(row), .elements = 19});
    }
    each_rank(kRanks, [&](uint32_t rank) {
      WorkerOptions options = box.options(dense);
      options.rank = static_cast<int32_t>(rank);
      Worker worker(options);
      worker.wait_all();
      for (uint64_t round = 1; round <= run.rounds; ++round) {
        std::vector<std::vector<float>> gradients(50);
        for (const auto& row : run.rows_of(rank, round, 0)) {
          std::vector<float>& sum = gradients[static_cast<size_t>(row.index)];
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += row.elements[i];
          if (sum.empty()) sum = row.elements;
        }
        for (size_t row = 0; row < 50; ++row) {
          std::ranges::copy(gradients[row], worker.gradient(row).begin());
          worker.push(row, {.null = gradients[row].empty()});
        }
        worker.wait_all();
        std::vector<std::byte> all;
        for (size_t row = 0; row < 50; ++row) {
          const auto bytes = worker.parameter_bytes(row);
          all.insert(all.end(), bytes.begin(), bytes.end());
        }
        EXPECT_TRUE(all == seen[rank][round - 1].keys[0])
            << "seed " << seed << ", rank " << rank << ", round " << round;
      }
      worker.barrier();
    });
  }
}

// One key, one rank: what a lazy step leaves alone.
TEST(Rows, OfALazyKeyTheOthersStayAsTheyAre) {
  Box box(2);
  JobSpec spec;
  spec.name = "lazy";
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 1}, {"momentum", 0.5}, {"weight_decay", 0.25}};
  spec.initial = "broadcast";
  spec.keys = {table("lazy", 64, 2, 4, 32, true), table("dense", 64, 2, 4, 32)};
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  worker.broadcast(std::vector<float>(256, 16.0f));
  const std::vector<int64_t> rows = {40, 3};
  const std::vector<float> ones(4, 1.0f);
  const auto value = [&](size_t key, size_t row) { return worker.parameters(key)[2 * row + 1]; };
  for (size_t key : {0, 1}) worker.push_rows(key, {rows, ones});
  worker.wait_all();
  EXPECT_EQ(value(0, 3), 16 - (1 + 4));
  EXPECT_EQ(value(0, 40), 16 - (1 + 4));
  EXPECT_EQ(value(0, 4), 16) << "neither decay";
  EXPECT_EQ(value(1, 3), 16 - (1 + 4));
  EXPECT_EQ(value(1, 4), 16 - 4) << "the gradient is zero, and decay is not";
  for (size_t key : {0, 1}) worker.push_rows(key, {{}, {}});
  worker.wait_all();
  EXPECT_EQ(value(0, 3), 11) << "nor momentum";
  EXPECT_EQ(value(1, 3), 11 - (0.5 * 5 + 0.25 * 11));
}

// As many bytes are sent as there are rows.
TEST(Rows, OnlyTheyTravel) {
  Box box(2);
  JobSpec spec;
  spec.name = "few";
  spec.keys = {table("t", 10'000, 16, 100)};
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  worker.wait_all();
  const auto bytes_in = [&] { return box.status().jobs.at(0).flow.bytes_in; };
  const uint64_t before = bytes_in();
  const std::vector<int64_t> rows = {9999, 17, 17, 0};
  const std::vector<float> elements(4 * 16, 2.0f);
  worker.push_rows(0, {rows, elements});
  worker.wait(0);
  EXPECT_EQ(worker.parameters(0)[0], 2);
  EXPECT_EQ(worker.parameters(0)[17 * 16], 4);
  EXPECT_EQ(worker.parameters(0)[9999 * 16 + 15], 2);
  EXPECT_EQ(worker.parameters(0)[16], 0);
  // Two chunks: two rows in one, and one in the other.
  constexpr uint64_t kSent = 2 * 4 + 3 * (4 + 16 * 4);
  for (int tries = 0; tries < 600 && bytes_in() - before < kSent; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is counted now and then
  }
  EXPECT_EQ(bytes_in() - before, kSent);
}

// Of a lazy key the chunks come back in which a row has changed.
TEST(Rows, OfALazyKeyOnlyWhatChangedComesBack) {
  Box box(2);
  JobSpec spec;
  spec.name = "back";
  spec.optimizer = "sgd";
  spec.hyper["lr"] = 1;
  spec.keys = {table("t", 100, 16, 10, 20, true)};  // five chunks
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  worker.wait_all();
  std::vector<float> mine(1600, 7.0f);  // what is here already is no result
  worker.register_memory(0, {.parameters = mine.data()});
  const auto bytes_out = [&] { return box.status().jobs.at(0).flow.bytes_out; };
  constexpr uint64_t kChunk = 20 * 16 * sizeof(float);
  const auto expect_out = [&](uint64_t bytes) {
    for (int tries = 0; tries < 600 && bytes_out() < bytes; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is counted now and then
    }
    EXPECT_EQ(bytes_out(), bytes);
  };
  expect_out(5 * kChunk);
  const std::vector<int64_t> rows = {99, 25, 21};
  const std::vector<float> elements(3 * 16, -1.0f);
  worker.push_rows(0, {rows, elements});
  worker.wait(0);
  expect_out(7 * kChunk);
  std::vector<float> want(1600, 0.0f);
  for (const int64_t row : rows) std::fill_n(want.begin() + row * 16, 16, 1.0f);
  EXPECT_TRUE(std::ranges::equal(worker.parameters(0), want));
  EXPECT_EQ(mine, want);
  worker.push_rows(0, {{}, {}});
  worker.wait(0);
  EXPECT_EQ(mine, want);

  // What is set comes back, whatever rows are sent.
  std::vector<float> set(1600, 5.0f);
  worker.set_state(std::vector<KeyState>{{.key = 0, .arrays = {set}, .step = 3}});
  worker.push_rows(0, {{}, {}});
  worker.wait(0);
  EXPECT_EQ(mine, set);
  expect_out(12 * kChunk);
}

// Of factors, too: a pair counts once its key is pushed.
TEST(Rows, OutOfLockStepEachPushIsAStep) {
  Box box(2);
  for (const bool lazy : {false, true}) {
    for (const char* consistency : {"ssp", "async"}) {
      JobSpec spec;
      spec.name = fmt::format("{}{}", consistency, lazy);
      spec.consistency = consistency;
      if (spec.consistency == "ssp") spec.slack = 2;
      spec.optimizer = "sgd";
      spec.hyper["lr"] = 1;
      spec.keys = {table("t", 40, 8, 3, 16, lazy), matrix("m", 40, 70, 2)};
      WorkerOptions options = box.options(spec);
      options.rank = 0;
      Worker worker(options);
      worker.wait_all();
      std::mt19937 random(7);
      const auto some = [&random](size_t count) {
        std::vector<float> values(count);
        for (float& x : values) x = static_cast<float>(random() % 9) - 4;
        return values;
      };
      std::vector<float> want_rows(320), want_factors(2800);
      for (uint64_t round = 1; round <= 4; ++round) {
        std::vector<int64_t> rows(3);
        for (int64_t& row : rows) row = static_cast<int64_t>(random() % 40);
        const std::vector<float> elements = some(24), left = some(80), right = some(140);
        worker.push_rows(0, {rows, elements});
        worker.push_factors(1, {left.data(), right.data(), 2});
        worker.wait_all();
        for (size_t i = 0; i < elements.size(); ++i) {
          want_rows[static_cast<size_t>(rows[i / 8]) * 8 + i % 8] -= elements[i];
        }
        for (size_t i = 0; i < want_factors.size(); ++i) {
          want_factors[i] -=
              std::fma(left[40 + i / 70], right[70 + i % 70], left[i / 70] * right[i % 70]);
        }
      }
      // The last push's step may not be in what it got; one of nothing looks.
      for (size_t key : {0, 1}) worker.push_null(key);
      worker.wait_all();
      EXPECT_TRUE(std::ranges::equal(worker.parameters(0), want_rows)) << spec.name;
      EXPECT_TRUE(std::ranges::equal(worker.parameters(1), want_factors)) << spec.name;
    }
  }
}

// They come in as many parts as a slot needs for them; of factors, too.
TEST(Rows, InitialParametersOfRankZero) {
  Box box(2);
  JobSpec spec;
  spec.name = "initial";
  spec.initial = "broadcast";
  spec.optimizer = "sgd";
  spec.world_size = 2;
  spec.keys = {table("m", 7000, 90, 1), table("n", 31, 2, 3, 0, true), matrix("o", 700, 900, 1),
               matrix("p", 31, 2, 3)};
  std::vector<float> initial;
  for (const KeySpec& key : spec.keys) initial.resize(initial.size() + key.elements);
  std::iota(initial.begin(), initial.end(), 0.0f);
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.broadcast(rank == 0 ? initial : std::vector<float>());
    size_t first = 0;
    for (size_t key = 0; key < worker.keys(); ++key) {
      const auto parameters = worker.parameters(key);
      EXPECT_TRUE(
          std::ranges::equal(parameters, std::span(initial).subspan(first, parameters.size())));
      first += parameters.size();
    }
    worker.barrier();
  });
}

TEST(Rows, AJobThatCannotBeIsRefused) {
  const auto refused = [](const std::string& what, const auto& change) {
    JobSpec spec;
    spec.name = "refused";
    spec.optimizer = "adam";
    spec.keys = {table("m", 100, 33, 4)};
    change(spec, spec.keys[0]);
    expect_error(ErrorCode::kInvalid, what, [&] { validate(spec); });
  };
  refused("keys[0].rows_limit: must be from 1 to 1048575 for format rows, got 0",
          [](JobSpec&, KeySpec& key) { key.rows_limit = 0; });
  refused("keys[0].rows_limit: must be from 1 to 1048575 for lazy, got 0",
          [](JobSpec&, KeySpec& key) { key = {.name = "m", .elements = 4, .lazy = true}; });
  refused("keys[0].rows_limit: must be from 1 to 1048575, got 1048576",
          [](JobSpec&, KeySpec& key) { key.rows_limit = 1 << 20; });
  refused("keys[0].rows_limit: needs format 'rows', got 'int8'",
          [](JobSpec&, KeySpec& key) { key.format = "int8"; });
  refused("keys[0].rank_limit: is 2, and so rows_limit must be 0, got 4",
          [](JobSpec&, KeySpec& key) { key.rank_limit = 2, key.format = "factors"; });
  refused("keys[0].rows_limit: needs the shape of a matrix, [rows, columns], got []",
          [](JobSpec&, KeySpec& key) { key.shape.clear(); });
  refused("keys[0].shape[1]: must be from 1 to 1048575, got 1048576",
          [](JobSpec&, KeySpec& key) { key = table("m", 1, 1 << 20, 1); });
  refused("their elements for 32 rows of 1048575 columns are more than a chunk may have",
          [](JobSpec&, KeySpec& key) { key = table("m", 100, (1 << 20) - 1, 5); });
  refused("keys[0].tile_rows: must be a multiple of 32 and at most 100, got 33",
          [](JobSpec&, KeySpec& key) { key.tile_rows = 33; });
  refused("gradient_dtype: must be", [](JobSpec& spec, KeySpec&) { spec.gradient_dtype = "rows"; });
  refused("keys[0].lazy: steps are of single rows, and not of whole rounds",
          [](JobSpec& spec, KeySpec& key) { spec.hyper["max_norm"] = 1, key.lazy = true; });
}

TEST(Rows, APushThatCannotBeIsRefused) {
  Box box(1);
  JobSpec spec = grouped_spec("job", 1, "");
  spec.keys.push_back(table("odd", 67, 33, 20, 32));
  spec.keys.push_back(table("one", 70, 16, 1, 2));
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  worker.wait_all();
  const size_t key = worker.key("one");
  const std::vector<float> elements(16 * 3, 1.0f);
  const auto push = [&](size_t of, const std::vector<int64_t>& rows, size_t count) {
    worker.push_rows(of, {rows, std::span(elements).first(count)});
  };
  expect_error(ErrorCode::kInvalid,
               "push_rows: 2 different rows for key 'one', whose rows_limit is 1: give the job a",
               [&] {
                 push(key, {1, 2, 1}, 48);
               });
  expect_error(ErrorCode::kInvalid,
               "push_rows: there is no row 70 of key 'one', which has rows 0 to 69",
               [&] { push(key, {70}, 16); });
  expect_error(ErrorCode::kInvalid, "there is no row -1 of key 'one'",
               [&] { push(key, {-1}, 16); });
  expect_error(ErrorCode::kInvalid,
               "push_rows: 2 rows of 16 columns for key 'one' have 31 elements", [&] {
                 push(key, {1, 2}, 31);
               });
  expect_error(ErrorCode::kInvalid, "of the gradient of key 'b' all rows are sent",
               [&] { push(1, {0}, 7); });
  expect_error(ErrorCode::kInvalid, "key 99 is out of range", [&] { push(99, {0}, 7); });
  expect_error(ErrorCode::kInvalid, "the rows of key 'one' are sent: use push_rows()",
               [&] { worker.push(key); });
  expect_error(ErrorCode::kInvalid, "key 'one' has no memory for its gradient: its rows are sent",
               [&] { worker.gradient(key); });
  expect_error(ErrorCode::kInvalid, "key 'one' can have no memory for its gradient",
               [&] { worker.register_memory(key, {.gradient = elements.data()}); });
  push(key, {69, 69, 69}, 48);
  worker.wait(key);
  EXPECT_EQ(worker.parameters(key)[69 * 16], 3.0f);

  JobSpec other = spec;
  other.keys[2].rows_limit = 3;
  other.keys[3].tile_rows = 0;  // as the job has it
  WorkerOptions second = box.options(other);
  expect_error(ErrorCode::kMismatch, "key 2 'odd': rows_limit is 3 here and 20 in the job",
               [&] { const Worker wrong(second); });
}

}  // namespace rows_test
}  // namespace phub
