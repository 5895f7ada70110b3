// A job of two ranks that trains beside whatever a test does, and checks every result: what happens
// to others must not be seen here.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "worker/worker.h"

namespace phub::testing {

class Bystander {
 public:
  explicit Bystander(const std::string& server) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      threads_.emplace_back([this, server, rank] { train(server, rank); });
    }
    for (int i = 0; i < 3000 && rounds_ == 0 && !failed_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  ~Bystander() {
    const uint64_t before = rounds_;
    for (int i = 0; i < 3000 && rounds_ < before + 3 && !failed_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_GE(rounds_, before + 3) << "the job beside has stopped";
    // Both stop after the same round.
    last_round_ = std::max<uint64_t>(rounds_ + 100, 1);
    for (std::thread& thread : threads_) thread.join();
    EXPECT_FALSE(failed_);
  }

 private:
  static constexpr size_t kElements = 9000;

  static JobSpec spec() {
    JobSpec spec;
    spec.name = "bystander";
    spec.keys = {{.name = "w", .elements = kElements}, {.name = "b", .elements = 3}};
    spec.world_size = 2;
    spec.lease_ms = 10000;
    return spec;
  }

  void train(const std::string& server, int32_t rank) {
    try {
      WorkerOptions options;
      options.server = server;
      options.spec = spec();
      options.rank = rank;
      options.connect_timeout_ms = 30'000;
      Worker worker(options);
      worker.wait_all();
      for (uint64_t round = 1; round <= last_round_ && !failed_; ++round) {
        for (size_t key = 0; key < 2; ++key) {
          for (size_t e = 0; float& g : worker.gradient(key)) g = value(rank, round, e++);
          worker.push(key);
        }
        for (size_t key = 0; key < 2; ++key) {
          worker.wait(key);
          for (size_t e = 0; const float sum : worker.parameters(key)) {
            if (sum == value(0, round, e) + value(1, round, e)) {
              ++e;
              continue;
            }
            ADD_FAILURE() << "the job beside: rank " << rank << ", round " << round << ", element "
                          << e << " is " << sum;
            failed_ = true;
            break;
          }
        }
        if (rank == 0) rounds_ = round;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      worker.leave();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the job beside: " << error.what();
      failed_ = true;
    }
  }
  static float value(int32_t rank, uint64_t round, size_t element) {
    return static_cast<float>((round * 31 + element * 7 + static_cast<uint64_t>(rank) * 1000003) %
                              65536);
  }

  std::atomic<uint64_t> rounds_{0}, last_round_{~uint64_t{0}};
  std::atomic<bool> failed_{false};
  std::vector<std::thread> threads_;
};

}  // namespace phub::testing
