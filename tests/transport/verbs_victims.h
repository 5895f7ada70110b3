// Two jobs that suffer nothing: one that trains on and checks every element of every result, and
// one that has stopped to look at its memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/verbs_server.h"
#include "worker/worker.h"

namespace phub::testing {

constexpr uint32_t kLongMs = 3600000;

inline JobSpec victim_spec(const std::string& name, uint32_t world_size) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "w", .elements = 30000}, {.name = "b", .elements = 33}};
  spec.chunk_elements = 4096;
  spec.world_size = world_size;
  spec.lease_ms = 20000;
  spec.progress_limit_ms = kLongMs;
  return spec;
}

// A whole number: sums of a few are exact.
inline float gradient_of(uint32_t rank, uint64_t round, size_t element) {
  return static_cast<float>((round * 31 + element * 7 + rank * 1000003ull) % 65536);
}

// Trains until it goes, two ranks in threads of their own, with the library.
class TrainingVictim {
 public:
  explicit TrainingVictim(const VerbsServer& server) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      threads_.emplace_back([this, rank, address = server.address()] { train(address, rank); });
    }
  }
  ~TrainingVictim() { stop(); }

  uint64_t rounds() const { return rounds_; }
  bool wait_for(uint64_t round) const {
    for (int i = 0; i < 60000 && rounds_ < round && !failed_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return rounds_ >= round;
  }
  void stop() {
    if (threads_.empty()) return;
    last_round_ = rounds_ + 100;  // both stop after the same one
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  // After stop().
  const std::string& problem() const { return problem_; }
  uint64_t reconnections() const { return reconnections_; }
  double slowest_round_s() const { return slowest_s_; }

 private:
  void train(const std::string& server, uint32_t rank) {
    try {
      WorkerOptions options;
      options.server = server;
      options.spec = victim_spec("training", 2);
      options.rank = static_cast<int32_t>(rank);
      options.transport = "verbs";
      Worker worker(options);
      worker.wait_all();
      for (uint64_t round = 1; round <= last_round_ && !failed_; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        for (size_t key = 0; key < worker.keys(); ++key) {
          for (size_t e = 0; float& g : worker.gradient(key)) g = gradient_of(rank, round, e++);
          worker.push(key);
        }
        worker.wait_all();
        for (size_t key = 0; key < worker.keys(); ++key) {
          for (size_t e = 0; const float sum : worker.parameters(key)) {
            const float expected = gradient_of(0, round, e) + gradient_of(1, round, e);
            if (sum == expected) {
              ++e;
              continue;
            }
            return fail_with("rank " + std::to_string(rank) + ", round " + std::to_string(round) +
                             ", key " + std::to_string(key) + ", element " + std::to_string(e) +
                             ": " + std::to_string(sum) + " instead of " +
                             std::to_string(expected));
          }
        }
        if (rank == 0) {
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
          slowest_s_ = std::max<double>(slowest_s_, took.count());
          rounds_ = round;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      reconnections_ += worker.stats().reconnections;
      worker.leave();
    } catch (const std::exception& error) {
      fail_with(error.what());
    }
  }
  void fail_with(const std::string& problem) {
    if (!failed_.exchange(true)) problem_ = problem;
  }

  std::atomic<uint64_t> rounds_{0}, last_round_{~uint64_t{0}}, reconnections_{0};
  std::atomic<bool> failed_{false};
  double slowest_s_ = 0;
  std::string problem_;
  std::vector<std::thread> threads_;
};

// One round of two ranks, and then nothing: from here on not a byte of its slots and results on the
// box may change. Every address and every key is known to the test.
class StillVictim {
 public:
  explicit StillVictim(const VerbsServer& server) : server_(server) {
    JobSpec spec = victim_spec("still", 2);
    spec.lease_ms = kLongMs;
    ranks_.resize(2);
    const auto round = [&](uint32_t rank) {
      ranks_[rank] = std::make_unique<OpenRank>(server, spec, static_cast<int32_t>(rank));
      OpenRank& open = *ranks_[rank];
      open.connect();
      for (size_t key = 0; key < 2; ++key) {
        const std::span<std::byte> bytes = open.session().gradient(key);
        std::span gradient(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
        // Other numbers than those of the job that trains: the memory is found by them.
        for (size_t e = 0; float& g : gradient) g = gradient_of(rank, 1, e++) + 0.5f;
        open.session().push(key, 0, false);
      }
      open.await();
    };
    std::thread other([&] { round(1); });
    round(0);
    other.join();
    const std::span<const std::byte> results = ranks_[0]->session().result(0);
    regions_.push_back({server.find(results), {}, results.size()});
    for (const auto& rank : ranks_) {
      regions_.push_back({rank->slots().base, {}, rank->slot_bytes()});
    }
    for (Region& region : regions_) region.before = server.read(region.address, region.bytes);
  }

  // The first address whose byte is not as it was; 0: none.
  uint64_t changed() const {
    for (const Region& region : regions_) {
      const std::vector<std::byte> now = server_.read(region.address, region.bytes);
      const auto [a, b] = std::ranges::mismatch(now, region.before);
      if (a != now.end()) return region.address + static_cast<uint64_t>(a - now.begin());
    }
    return 0;
  }
  uint64_t results() const { return regions_.front().address; }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const Region& region : regions_) sum += region.bytes;
    return sum;
  }
  const OpenRank& rank(size_t i) const { return *ranks_[i]; }

 private:
  struct Region {
    uint64_t address;
    std::vector<std::byte> before;
    uint64_t bytes;
  };
  const VerbsServer& server_;
  std::vector<std::unique_ptr<OpenRank>> ranks_;
  std::vector<Region> regions_;
};

}  // namespace phub::testing
