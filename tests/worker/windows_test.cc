// A box with one place for each rank: what its windows grow by is in the status, and in the limit
// of its memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/training.h"
#include "worker/worker.h"

namespace phub::testing {
namespace windows_test {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint32_t kRanks = 2, kKeys = 4;
constexpr uint64_t kElements = 8192;  // a key is a chunk
constexpr uint64_t kNoLimit = uint64_t{1} << 33;

class Windows : public ::testing::Test {
 protected:
  Windows() { setenv("PHUB_SLOT_WINDOW", "1", 1); }
  ~Windows() override {
    if (before_.empty()) {
      unsetenv("PHUB_SLOT_WINDOW");
    } else {
      setenv("PHUB_SLOT_WINDOW", before_.c_str(), 1);
    }
  }

  static JobSpec spec(const std::string& name, uint32_t ranks) {
    JobSpec spec;
    spec.name = name;
    spec.world_size = ranks;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    for (uint32_t key = 0; key < kKeys; ++key) {
      spec.keys.push_back({.name = std::to_string(key), .elements = kElements});
    }
    return spec;
  }
  static std::unique_ptr<Worker> join(const Box& box, const JobSpec& spec, uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    options.transport = "tcp";
    options.send_order = "fifo";
    auto worker = std::make_unique<Worker>(options);
    worker->wait_all();
    return worker;
  }
  static void push(Worker& worker, size_t key) {
    for (float& g : worker.gradient(key)) g = 1;
    worker.push(key);
  }
  static JobStatus status_of(Box& box, const std::string& name) {
    for (JobStatus& job : box.status().jobs) {
      if (job.name == name) return job;
    }
    return {};
  }
  // The memory of such a job, once its ranks are there.
  static uint64_t memory_of(const JobSpec& spec) {
    Box box(1, kNoLimit);
    std::atomic<uint64_t> bytes = 0;
    each_rank(spec.world_size, [&](uint32_t rank) {
      const auto worker = join(box, spec, rank);
      worker->barrier();
      if (rank == 0) bytes = box.status().memory_bytes;
      worker->barrier();
      worker->leave();
    });
    return bytes;
  }

 private:
  const char* const set_ = std::getenv("PHUB_SLOT_WINDOW");
  const std::string before_ = set_ != nullptr ? set_ : "";
};

TEST_F(Windows, WhatTheyGrewByIsInTheStatusWhileTheyAreLarger) {
  Box box(1, kNoLimit);
  JobSpec late = spec("late", kRanks);
  late.progress_limit_ms = 20'000;  // a window grows after 3 seconds
  std::atomic<bool> seen = false;
  each_rank(kRanks, [&](uint32_t rank) {
    const auto worker = join(box, late, rank);
    worker->barrier();
    if (rank == 0) {
      const JobStatus first = status_of(box, late.name);
      EXPECT_GE(first.window_bytes, kRanks * kElements * sizeof(float));
      EXPECT_EQ(first.window_grown_bytes, 0u);
      for (size_t key = 0; key < kKeys; ++key) push(*worker, key);
      JobStatus now;
      EXPECT_TRUE(becomes([&] {
        now = status_of(box, late.name);
        return now.window_grown_bytes > 0;
      }));
      EXPECT_GE(now.window_growths, 1u);
      EXPECT_EQ(now.window_bytes, first.window_bytes + now.window_grown_bytes);
      EXPECT_GE(now.memory_bytes, first.memory_bytes + now.window_grown_bytes);
      EXPECT_GE(box.status().memory_bytes, now.memory_bytes);
      seen = true;
    } else {
      becomes([&] { return seen.load(); });
      for (size_t key = 0; key < kKeys; ++key) push(*worker, key);
    }
    worker->wait_all();
    worker->barrier();
    if (rank == 0) EXPECT_EQ(status_of(box, late.name).window_grown_bytes, 0u);
    worker->barrier();
    worker->leave();
  });
  EXPECT_TRUE(box.becomes_empty());
  EXPECT_THAT(box.notes(), Not(Contains(HasSubstr("windows"))));
}

// Two ranks that push in opposite orders; another job has the memory that they would need.
TEST_F(Windows, GrowOnlyIfTheLimitHasRoom) {
  const JobSpec filler = spec("filler", 1), opposite = spec("opposite", kRanks);
  Box box(1, memory_of(filler) + memory_of(opposite) + kElements);
  const auto first = join(box, filler, 0);
  std::thread ranks([&] {
    each_rank(kRanks, [&](uint32_t rank) {
      const auto worker = join(box, opposite, rank);
      worker->barrier();
      for (size_t i = 0; i < kKeys; ++i) push(*worker, rank == 0 ? i : kKeys - 1 - i);
      worker->wait_all();
      for (size_t key = 0; key < kKeys; ++key) EXPECT_EQ(worker->parameters(key)[0], 2);
      worker->leave();
    });
  });
  const auto refused = [&] {
    const std::vector<std::string> notes = box.notes();
    return std::ranges::count_if(notes, [](const std::string& note) {
      return note.starts_with("job 'opposite': its windows of gradients cannot grow");
    });
  };
  EXPECT_TRUE(becomes([&] { return refused() > 0; }));
  for (int i = 0; i < 50; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10))) {
    const ServerStatus status = box.status();
    EXPECT_LE(status.memory_bytes, status.memory_limit_bytes);
    EXPECT_EQ(status_of(box, "opposite").completed_round, 0u);
  }
  first->leave();
  ranks.join();
  EXPECT_TRUE(box.becomes_empty());
  EXPECT_EQ(refused(), 1);
}

}  // namespace windows_test
}  // namespace phub::testing
