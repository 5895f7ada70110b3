// Keys of whose gradients the rows are sent that are not zero, or factors: what travels, and what
// is refused (any_job_test: what every rank has of them is what one process computes alone).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace rows_test {

using testing::alone;
using testing::Box;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;
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

KeySpec matrix(const std::string& name, uint64_t rows, uint64_t columns, uint32_t rank_limit,
               uint32_t tile_rows = 0) {
  return {.name = name,
          .elements = rows * columns,
          .shape = {rows, columns},
          .format = "factors",
          .rank_limit = rank_limit,
          .tile_rows = tile_rows};
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

// Out of lock-step a rank gets the chunks that some rank has changed since its result before.
TEST(Rows, OfALazyKeyEachRankGetsWhatChangedSince) {
  Box box(2);
  JobSpec spec;
  spec.name = "since";
  spec.world_size = 2;
  spec.consistency = "async";
  spec.optimizer = "sgd";
  spec.hyper["lr"] = 1;
  spec.keys = {table("t", 100, 16, 10, 20, true)};  // five chunks
  WorkerOptions options = box.options(spec);
  options.await_ranks = false;
  options.rank = 0;
  Worker first(options);
  options.rank = 1;
  Worker second(options);
  first.wait_all();
  second.wait_all();
  constexpr uint64_t kChunk = 20 * 16 * sizeof(float);
  uint64_t chunks = 10;  // sent by the box so far
  std::vector<float> want(1600, 0.0f);
  const auto push = [&](Worker& worker, const std::vector<int64_t>& rows, uint64_t more_chunks) {
    const std::vector<float> elements(rows.size() * 16, -1.0f);
    worker.push_rows(0, {rows, elements});
    worker.wait(0);
    for (const int64_t row : rows) {
      for (int64_t i = 0; i < 16; ++i) want[static_cast<size_t>(row * 16 + i)] += 1;
    }
    EXPECT_TRUE(std::ranges::equal(worker.parameters(0), want)) << chunks;
    chunks += more_chunks;
    const auto bytes_out = [&] { return box.status().jobs.at(0).flow.bytes_out; };
    for (int tries = 0; tries < 600 && bytes_out() < chunks * kChunk; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is counted now and then
    }
    EXPECT_EQ(bytes_out(), chunks * kChunk);
  };
  push(first, {25}, 1);
  push(second, {}, 1);
  push(second, {}, 0);
  push(first, {}, 0);
  push(second, {99, 21, 0}, 3);
  push(second, {99}, 1);
  push(first, {25}, 3);
  push(second, {}, 1);
  push(first, {}, 0);
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

JobSpec spec_of_factors(const std::string& name, uint32_t ranks) {
  JobSpec spec = grouped_spec(name, ranks, "");
  spec.keys[0].elements = 500;
  spec.keys.push_back(matrix("wide", 5, 1000, 3, 4));
  spec.keys.push_back(matrix("tall", 300, 2, 1, 48));
  spec.keys.push_back(matrix("odd", 67, 33, 4, 32));
  spec.keys.push_back(matrix("row", 1, 40, 2, 1));
  return spec;
}

// The rows of a chunk are the server's to choose: as many chunks as it has cores.
TEST(Factors, AMatrixHasAsManyChunksAsThereAreCores) {
  Box box(2);
  JobSpec spec = spec_of_factors("tiles", 2);
  for (KeySpec& key : spec.keys) key.tile_rows = 0;
  GroupedTraining run{.spec = spec, .seed = 3};
  std::vector<std::vector<Results>> seen(2);
  size_t cores = 0;  // of all boxes
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
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

TEST(Factors, APushThatCannotBeIsRefused) {
  Box box(1);
  JobSpec spec = spec_of_factors("job", 1);
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

}  // namespace rows_test
}  // namespace phub
