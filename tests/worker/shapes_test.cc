// Shapes of keys, from the worker to the files of a checkpoint and back: the server is a process
// that is killed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"

namespace phub::testing {
namespace shapes_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Shape = std::vector<uint64_t>;

class Shapes : public ::testing::Test {
 protected:
  // The server, for the first time or again.
  void serve() {
    if (server_) {
      EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
    }
    server_.emplace(PHUB_BINARY,
                    std::vector<std::string>{"--checkpoints", folder(), "--checkpoint-every", "1"});
  }
  std::string folder() const { return directory_.path() + "/checkpoints"; }

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

  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  std::optional<ServerProcess> server_;
  std::optional<Worker> worker_;
};

TEST_F(Shapes, AreThoseOfParametersAndStates) {
  serve();
  train({4, 5, 1000});
  const std::vector<Shape> keys = {{4, 5, 1000}, {7}};
  EXPECT_THAT(saved(), ElementsAre(keys, keys, keys));  // parameters, exp_avg, exp_avg_sq
  serve();
  for (const Shape& other : {Shape{5, 4, 1000}, Shape{}}) {
    try {
      join(other);
      ADD_FAILURE() << "it joined";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      EXPECT_THAT(error.what(), HasSubstr("in the job"));
      EXPECT_THAT(error.what(), HasSubstr("key 0 'w': shape is"));
    }
  }
  EXPECT_GT(join({4, 5, 1000}).first_round(), 1u);
}

TEST_F(Shapes, MayBeGivenToAJobThatWasSavedWithout) {
  serve();
  train({});
  const std::vector<Shape> flat = {{20'000}, {7}};
  EXPECT_THAT(saved(), ElementsAre(flat, flat, flat));
  serve();
  train({200, 100});
  EXPECT_GT(worker_->first_round(), 1u);
  const std::vector<Shape> keys = {{200, 100}, {7}};
  EXPECT_THAT(saved(), ElementsAre(keys, keys, keys));
}

}  // namespace shapes_test
}  // namespace phub::testing
