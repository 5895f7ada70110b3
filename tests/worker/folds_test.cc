// Jobs whose keys are values that are brought together by an operation (any_job_test: what every
// rank gets is what one process computes alone).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/temporary_directory.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "worker/worker.h"

namespace phub {
namespace folds_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::grouped_spec;

// In an order that rounding could tell, and in which integers wrap around.
TEST(Folds, ValuesOf64Bits) {
  Box box(2);
  JobSpec spec;
  spec.name = "wide";
  spec.optimizer = "fold";
  spec.initial = "broadcast";
  spec.keys = {{.name = "sum", .elements = 6, .operation = "add", .value_type = "f64"},
               {.name = "product", .elements = 2, .operation = "multiply", .value_type = "i64"}};
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  Worker worker(options);
  const auto put = [](std::span<float> words, auto values) {
    std::memcpy(words.data(), values.begin(), values.size() * sizeof *values.begin());
  };
  std::vector<float> initial(8);
  put(initial, std::initializer_list<double>{1, 1e300, 0});
  put(std::span(initial).subspan(6), std::initializer_list<int64_t>{int64_t{3} << 61});
  worker.broadcast(initial);
  put(worker.gradient(0), std::initializer_list<double>{0x1p-52, 1, -0.0});
  put(worker.gradient(1), std::initializer_list<int64_t>{3});
  worker.push(0);
  worker.push(1);
  worker.wait_all();
  double sums[3];
  int64_t product = 0;
  std::memcpy(sums, worker.parameters(0).data(), sizeof sums);
  std::memcpy(&product, worker.parameters(1).data(), sizeof product);
  EXPECT_EQ(sums[0], 1 + 0x1p-52);
  EXPECT_EQ(sums[1], 1e300);
  EXPECT_EQ(sums[2], 0);
  EXPECT_EQ(product, int64_t{1} << 61);
}

// Two words of a job are one value of a file.
TEST(Folds, ACheckpointHoldsValuesOfTheirTypes) {
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  Box box("core:2 pu:1", uint64_t{1} << 33, Box::Wrap(), {.folder = folder.path(), .every = 1000});
  JobSpec spec;
  spec.name = "saved";
  spec.optimizer = "fold";
  spec.keys = {
      {.name = "f32", .elements = 6, .operation = "add", .value_type = "f32"},
      {.name = "f64", .elements = 6, .operation = "add", .value_type = "f64"},
      {.name = "i64", .elements = 12, .shape = {2, 6}, .operation = "max", .value_type = "i64"}};
  Worker worker(box.options(spec));
  for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
  worker.wait_all();
  worker.await_checkpoint(worker.checkpoint(), 60'000);
  Checkpoints saved(folder.path());
  const auto reader = saved.open(spec.name, saved.list(spec.name).at(0));
  const std::vector<TensorInfo> want = {{"f32", TensorType::kF32, {6}},
                                        {"f64", TensorType::kF64, {3}},
                                        {"i64", TensorType::kI64, {2, 3}}};
  EXPECT_EQ(reader->tensors(kParametersFile).tensors, want);
}

// Each contribution when it comes.
TEST(Folds, OutOfLockStep) {
  Box box(2);
  for (const char* consistency : {"ssp", "async"}) {
    constexpr uint32_t kRanks = 3, kRounds = 20;
    JobSpec spec = grouped_spec(consistency, kRanks, "");
    spec.optimizer = "fold";
    spec.consistency = consistency;
    spec.keys = {{.name = "sum", .elements = 300, .operation = "add", .value_type = "i32"},
                 {.name = "max", .elements = 300, .operation = "max", .value_type = "i32"}};
    each_rank(kRanks, [&](uint32_t rank) {
      WorkerOptions options = box.options(spec);
      options.rank = static_cast<int32_t>(rank);
      Worker worker(options);
      worker.wait_all();
      for (uint32_t round = 1; round <= kRounds; ++round) {
        for (size_t key : {0, 1}) {
          std::vector<int32_t> values(300, static_cast<int32_t>(100 * round + rank));
          std::memcpy(worker.gradient(key).data(), values.data(), values.size() * 4);
          worker.push(key);
        }
        worker.wait_all();
      }
      worker.barrier();
      for (size_t key : {0, 1}) worker.push_null(key);
      worker.wait_all();
      worker.barrier();
      int32_t sum = 0, most = 0;
      std::memcpy(&sum, worker.parameters(0).data(), 4);
      std::memcpy(&most, worker.parameters(1).data() + 299, 4);
      int32_t expected = 0;
      for (uint32_t round = 1; round <= kRounds; ++round) {
        for (uint32_t r = 0; r < kRanks; ++r) expected += static_cast<int32_t>(100 * round + r);
      }
      EXPECT_EQ(sum, expected);
      EXPECT_EQ(most, static_cast<int32_t>(100 * kRounds + kRanks - 1));
    });
  }
}

TEST(Folds, WhatCannotBeIsRefused) {
  const auto refuse = [](const std::function<void(JobSpec&)>& spoil, const std::string& message) {
    JobSpec spec;
    spec.name = "wrong";
    spec.optimizer = "fold";
    spec.keys = {{.name = "k", .elements = 64, .operation = "add", .value_type = "f64"}};
    EXPECT_NO_THROW(validate(spec));
    spoil(spec);
    expect_error(ErrorCode::kInvalid, message, [&] { validate(spec); });
  };
  refuse([](JobSpec& s) { s.keys[0].operation = "xor"; }, "keys[0].operation");
  refuse([](JobSpec& s) { s.keys[0].operation = ""; }, "keys[0].operation");
  refuse([](JobSpec& s) { s.keys[0].value_type = "f16"; }, "keys[0].value_type");
  refuse([](JobSpec& s) { s.keys[0].operation = "or"; }, "of whole numbers");
  refuse([](JobSpec& s) { s.keys[0].elements = 63; }, "63 are an odd number");
  refuse([](JobSpec& s) { s.keys[0].shape = {64, 1}; }, "1 are an odd number");
  refuse([](JobSpec& s) { s.optimizer = "sgd"; }, "is for optimizer 'fold'");
}

}  // namespace folds_test
}  // namespace phub
