// Shapes and types of keys, from the worker to the files of a checkpoint and back: the server is a
// process that is killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"

namespace phub::testing {
namespace shapes_test {

using ::testing::ElementsAre;
using Shape = std::vector<uint64_t>;

class Shapes : public SavedBoxTest {
 protected:
  Shapes() : SavedBoxTest(PHUB_BINARY) {}

  static JobSpec spec_of(const Shape& shape) {
    JobSpec spec;
    spec.name = "shapes";
    spec.optimizer = "adam";
    spec.keys = {{.name = "w", .elements = 20'000, .shape = shape}, {.name = "b", .elements = 7}};
    return spec;
  }
  Worker join(const Shape& shape) { return Worker(server_->options(spec_of(shape))); }

  // Trains until another checkpoint is there, which its worker does not leave: the job goes on.
  void train(const Shape& shape) {
    worker_.emplace(server_->options(spec_of(shape)));
    const auto durable = [this] {
      return ControlClient(server_->address()).job_status("shapes").durable_round;
    };
    const uint64_t before = durable();
    ASSERT_TRUE(becomes([&] {
      worker_->push(0);
      worker_->push(1);
      worker_->wait_all();
      return durable() > before;
    }));
  }
  // Of every file of tensors in the newest checkpoint: the shapes of both keys.
  std::vector<std::vector<Shape>> saved() {
    Checkpoints checkpoints(folder());
    const auto reader = checkpoints.open("shapes", checkpoints.list("shapes").front());
    std::vector<std::vector<Shape>> all;
    for (const CheckpointFile& file : reader->manifest().files) {
      const auto& tensors = reader->tensors(file.name).tensors;
      all.push_back({tensors.at(0).shape, tensors.at(1).shape});
    }
    return all;
  }

  std::optional<Worker> worker_;
};

TEST_F(Shapes, AreThoseOfParametersAndStates) {
  serve(1);
  train({4, 5, 1000});
  const std::vector<Shape> keys = {{4, 5, 1000}, {7}};
  EXPECT_THAT(saved(), ElementsAre(keys, keys, keys));  // parameters, exp_avg, exp_avg_sq
  die_and_come_back(1);
  for (const Shape& other : {Shape{5, 4, 1000}, Shape{}}) {
    expect_error(ErrorCode::kMismatch, "key 0 'w': shape is", [&] { join(other); });
  }
  EXPECT_GT(join({4, 5, 1000}).first_round(), 1u);
}

TEST_F(Shapes, MayBeGivenToAJobThatWasSavedWithout) {
  serve(1);
  train({});
  const std::vector<Shape> flat = {{20'000}, {7}};
  EXPECT_THAT(saved(), ElementsAre(flat, flat, flat));
  die_and_come_back(1);
  train({200, 100});
  EXPECT_GT(worker_->first_round(), 1u);
  const std::vector<Shape> keys = {{200, 100}, {7}};
  EXPECT_THAT(saved(), ElementsAre(keys, keys, keys));
}

// Two words of a job are one value of a file.
TEST(Values, AreSavedInTheirTypes) {
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

}  // namespace shapes_test
}  // namespace phub::testing
