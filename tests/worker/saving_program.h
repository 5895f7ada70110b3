// A training program with state of its own, a generator whose numbers are the gradients, which its
// ranks save as their parts of checkpoints.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/worker/saved_box.h"
#include "transport/control/job_spec.h"
#include "worker/worker.h"

namespace phub::testing {

inline constexpr size_t kKeys = 3;
inline constexpr uint64_t kElements = 12'000;

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline JobSpec saving_spec(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.optimizer = "adam";
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  for (size_t key = 0; key < kKeys; ++key)
    spec.keys.push_back({fmt::format("k{}", key), kElements});
  return spec;
}

// What a training program has beside the parameters.
struct Program {
  explicit Program(uint32_t rank) : random(rank + 1) {}
  std::mt19937_64 random;
  uint64_t position = 0;  // rounds that it has computed

  RankState state() const {
    std::ostringstream text;
    text << random;
    return {{"random", bytes_of(text.str())}, {"position", bytes_of(std::to_string(position))}};
  }
  void load(const Worker& worker, uint32_t rank) {
    *this = Program(rank);
    const auto saved = worker.restored("random");
    if (!saved) {
      EXPECT_EQ(worker.first_round(), 1u) << "rank " << rank << " got nothing back";
      return;
    }
    std::istringstream(text_of(*saved)) >> random;
    position = std::stoull(text_of(worker.restored("position").value()));
    EXPECT_EQ(position + 1, worker.first_round()) << "rank " << rank;
    EXPECT_FALSE(worker.restored("other"));
  }
  // A round up to its last wait. Layers may be pushed before all results of the last round are
  // here.
  void train(Worker& worker) {
    std::vector<float> numbers(kKeys);
    for (float& number : numbers) number = static_cast<float>(random() % 1000) / 1000 - 0.5f;
    ++position;
    for (size_t key = 0; key < kKeys; ++key) {
      const std::span<float> gradient = worker.gradient(key);
      for (size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] = numbers[key] * static_cast<float>(i % 17);
      }
      worker.push(key);
    }
    for (size_t key = 0; key < kKeys; ++key) worker.wait(key);
  }
};

inline std::string parameters_of(const Worker& worker) {
  std::string all;
  for (size_t key = 0; key < kKeys; ++key) all += text_of(worker.parameter_bytes(key));
  return all;
}

// All ranks in threads, until `rounds` are done, whatever happens to the server; none goes beyond
// round `allowed`, so `rounds` may change while it is beyond that. `anew`: a rank that lost the
// server begins as a new process would. `below`: they are at racks. Returns rank 0's parameters.
inline std::string run_saving(const std::vector<WorkerOptions>& options,
                              const std::atomic<uint64_t>& rounds,
                              const std::atomic<uint64_t>& allowed, bool anew, bool below = false) {
  std::string result;
  std::vector<std::jthread> ranks;
  for (uint32_t rank = 0; rank < options.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      Program program(rank);
      WorkerOptions mine = options[rank];
      mine.saver = [&program](uint64_t round) {
        EXPECT_EQ(program.position, round);
        return program.state();
      };
      SavedBoxTest::through_rewinds(
          mine, anew,
          [&](Worker& worker) {
            program.load(worker, rank);
            worker.broadcast({});
            while (program.position < rounds) {
              if (program.position < allowed) program.train(worker);
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            worker.barrier();
            if (rank == 0) result = parameters_of(worker);
            worker.barrier();
            worker.leave();
          },
          below);
    });
  }
  return ranks.clear(), result;
}

}  // namespace phub::testing
