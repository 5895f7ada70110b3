// The server runs out of memory: one allocation of its threads beside the control thread fails, the
// first, the second and so on until none fails, during a join, a snapshot and a restore. Each time
// the server lives, a job beside it sees nothing, the error is clear, and the same succeeds
// afterwards.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/bystander.h"
#include "tests/worker/failing_allocation.h"
#include "tests/worker/training.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub::testing {
namespace out_of_memory_test {

using ::testing::HasSubstr;

constexpr uint64_t kElements = 20'000;

// With PHUB_TEST_SCALE 0.1 every twentieth allocation fails, others in every run.
uint64_t stride() {
  const double scale = test_scale();
  return scale > 0 && scale < 1 ? static_cast<uint64_t>(2 / scale) : 1;
}

class OutOfMemory : public ::testing::Test {
 protected:
  ~OutOfMemory() override {
    bystander_.reset();
    box_.reset();
    std::filesystem::remove_all(folder_);
  }
  WorkerOptions options() const {
    JobSpec spec;
    spec.name = "victim";
    spec.world_size = 1;
    spec.optimizer = "adam";
    spec.initial = "zeros";
    spec.keys = {{"w", kElements}, {"b", 7}};
    WorkerOptions options = box_->options(spec);
    options.rank = 0;
    return options;
  }
  void train(Worker& worker) {
    for (size_t key = 0; key < 2; ++key) {
      for (float& g : worker.gradient(key)) g = 0.5f;
      worker.push(key);
    }
    worker.wait_all();
  }
  bool only_the_bystander_is_left() {
    return becomes([this] { return box_->status().jobs.size() == 1; });
  }
  // `action` while the n-th allocation fails, for n = 1, 2, … until it needs fewer; `again` after
  // each of these. Returns how often it failed.
  uint64_t exhaust(const std::function<void()>& action, const std::function<void()>& again) {
    uint64_t failures = 0;
    for (uint64_t n = 1 + fresh_seeds(1).first % stride();; n += stride()) {
      SCOPED_TRACE(fmt::format("allocation {}", n));
      FailingAllocation failing(n);
      try {
        action();
      } catch (const Error& error) {
        ++failures;
        EXPECT_EQ(name_of(error.code()), name_of(ErrorCode::kFull)) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("out of memory"));
      }
      failing.disarm();
      const bool failed = failing.has_failed();
      again();
      if (HasFailure()) return failures;
      if (!failed) {
        fmt::print(stderr, "{} allocations, {} failures\n", n - 1, failures);
        return failures;
      }
    }
  }

  // In memory, where syncing takes no time.
  const std::string folder_ = fmt::format("/dev/shm/phub-out-of-memory-{}", getpid());
  std::optional<Box> box_{std::in_place, "pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap{},
                          CheckpointOptions{.folder = folder_, .every = 1'000'000}};
  std::optional<Bystander> bystander_{box_->address()};
};

TEST_F(OutOfMemory, DuringAJoin) {
  const uint64_t memory = box_->status().memory_bytes;
  const auto join = [&] {
    Worker worker(options());
    worker.wait_all();
    train(worker);
    EXPECT_GT(worker.parameters(0)[0], -1);
    worker.leave();
  };
  const auto again = [&] {
    EXPECT_TRUE(only_the_bystander_is_left());
    EXPECT_TRUE(becomes([&] { return box_->status().memory_bytes == memory; }));
    EXPECT_NO_THROW(join());
    EXPECT_TRUE(only_the_bystander_is_left());
  };
  EXPECT_GT(exhaust(join, again), 0u);
}

TEST_F(OutOfMemory, DuringASnapshot) {
  Worker worker(options());
  worker.wait_all();
  train(worker);
  const auto save = [&] {
    const uint64_t round = worker.checkpoint();
    for (int i = 0; i < 20; ++i) {  // a worker asks less often
      for (const JobStatus& job : box_->status().jobs) {
        if (job.name == "victim" && job.durable_round >= round) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    worker.await_checkpoint(round, 30'000);
  };
  const auto again = [&] {
    train(worker);
    EXPECT_NO_THROW(save());
    train(worker);
  };
  EXPECT_GT(exhaust(save, again), 0u);
}

TEST_F(OutOfMemory, DuringARestore) {
  uint64_t saved = 0;
  const auto lose = [&](std::unique_ptr<Worker> worker) {
    worker->end("this process dies");
    worker.reset();
    EXPECT_TRUE(only_the_bystander_is_left());
  };
  const auto begin = [&] {
    auto worker = std::make_unique<Worker>(options());
    worker->wait_all();
    EXPECT_EQ(worker->first_round(), saved + 1);
    return worker;
  };
  std::vector<float> parameters;
  {
    auto worker = begin();
    for (int i = 0; i < 2; ++i) {  // there is an older one, which must not be taken
      train(*worker);
      saved = worker->checkpoint();
      worker->await_checkpoint(saved, 30'000);
    }
    parameters.assign(worker->parameters(0).begin(), worker->parameters(0).end());
    lose(std::move(worker));
  }
  const auto restore = [&] { lose(begin()); };
  const auto again = [&] {
    auto worker = begin();
    EXPECT_TRUE(std::ranges::equal(worker->parameters(0), parameters));
    lose(std::move(worker));
  };
  EXPECT_GT(exhaust(restore, again), 0u);
}

}  // namespace out_of_memory_test
}  // namespace phub::testing
