// Workers and a box whose NICs have budgets, over TCP: the same bits as without, no faster than the
// budget, and asleep meanwhile. Out of lock-step: what is carried over arrives, all of it, and in
// time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "transport/paced/transport.h"
#include "transport/transport.h"

namespace phub {
namespace budget_test {

using testing::Box;
using testing::each_rank;
using testing::expect_error;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kRanks = 2;

Box paced_box(uint64_t bytes_per_s) {
  return Box(2, uint64_t{1} << 33, [bytes_per_s](std::unique_ptr<Transport> transport) {
    const bool shared = transport->shares_memory();
    return shared ? std::move(transport)
                  : make_paced(std::move(transport), {.bytes_per_s = bytes_per_s});
  });
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Outcome {
  std::vector<float> result;  // rank 0's parameters, key after key
  double seconds = 0, cpu = 0;
};

constexpr uint64_t kRounds = 2;
constexpr uint64_t kElements = 200'000;  // of all keys

// Rounds of a model of 800 KB, with random integers.
Outcome exchange(const Box& box, const std::string& budget, const std::string& order,
                 uint64_t seed) {
  JobSpec spec;
  spec.name = "budget";
  for (const char* name : {"a", "b", "c", "d"}) {
    spec.keys.push_back({.name = name, .elements = kElements / 4});
  }
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.optimizer = "momentum";
  Outcome run;
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.transport = "tcp";
    options.rank = static_cast<int32_t>(rank);
    options.nic_budget = budget;
    options.send_order = order;
    Worker worker(options);
    worker.wait_all();
    worker.barrier();
    const auto start = Clock::now();
    const double cpu = cpu_seconds();
    std::mt19937 random(static_cast<uint32_t>(seed * 7 + rank));
    for (uint64_t round = 0; round < kRounds; ++round) {
      for (size_t key = 0; key < worker.keys(); ++key) {
        for (float& g : worker.gradient(key)) g = static_cast<float>(random() % 64);
        worker.push(key);
      }
      worker.wait_all();
    }
    worker.barrier();
    if (rank != 0) return;
    run.seconds = seconds_since(start);
    run.cpu = cpu_seconds() - cpu;
    for (size_t key = 0; key < worker.keys(); ++key) {
      const auto parameters = worker.parameters(key);
      run.result.insert(run.result.end(), parameters.begin(), parameters.end());
    }
  });
  return run;
}

constexpr double kPayload = kRounds * kElements * sizeof(float);  // of a rank, one way

class Budget : public ::testing::Test {
 protected:
  const uint64_t seed_ = testing::fresh_seeds(1).first;
};

TEST_F(Budget, OfAWorkerChangesNoBitsAndIsKept) {
  const Outcome free = exchange(Box(2), "", "priority", seed_);
  constexpr double kRate = 2e6;
  for (const char* order : {"priority", "fifo", "random", "magnitude"}) {
    const Outcome paced = exchange(Box(2), "2000000", order, seed_);
    EXPECT_EQ(paced.result, free.result) << order;
    EXPECT_GE(paced.seconds, (kPayload - (64 << 10)) / kRate) << order;
    // Asleep while there are no tokens: nobody spins.
    EXPECT_LT(paced.cpu, paced.seconds * 0.5) << order;
  }
}

// Who waits for tokens does not sleep until something arrives, or for long.
TEST_F(Budget, AWorkerGoesOnWhenTokensCome) {
  constexpr double kLimit = 10 * kPayload / 20e6;  // a wait that is too long takes much longer
  double seconds = kLimit;
  for (int turn = 0; turn < 10 && seconds >= kLimit;
       ++turn) {  // a busy machine is late, but not always
    seconds = exchange(Box(2), "20000000", "fifo", seed_).seconds;
  }
  EXPECT_LT(seconds, kLimit);
}

TEST_F(Budget, OfABoxChangesNoBitsAndIsKept) {
  const Outcome free = exchange(Box(2), "", "priority", seed_);
  constexpr uint64_t kRate = 4'000'000;
  constexpr double kSeconds = kRanks * kPayload / static_cast<double>(kRate);
  Outcome paced;
  for (int turn = 0; turn < 10; ++turn) {  // a busy machine is late, but not always
    paced = exchange(paced_box(kRate), "", "priority", seed_);
    EXPECT_EQ(paced.result, free.result);
    // Each rank gets every result, from one NIC; the ones before the first round are sent already.
    EXPECT_GE(paced.seconds, kSeconds - 2 * (64 << 10) / static_cast<double>(kRate));
    EXPECT_LT(paced.cpu, paced.seconds * 0.5);
    if (paced.seconds < 2 * kSeconds) break;
  }
  EXPECT_LT(paced.seconds, 2 * kSeconds);
}

TEST_F(Budget, IsShownInTheStatusOfABox) {
  Box box = paced_box(4'000'000);
  exchange(box, "", "priority", seed_);
  uint64_t budgets = 0;
  for (const NodeStatus& node : box.status().nodes) {
    for (const NicStatus& nic : node.nics) {
      const bool tcp = nic.transport == "tcp";
      EXPECT_EQ(nic.budget_bytes_per_s, tcp ? 4'000'000u : 0u) << nic.name;
      budgets += tcp;
    }
  }
  EXPECT_GE(budgets, 1u);
}

TEST_F(Budget, WrongOptionsAreRefusedBeforeTheServerIsAsked) {
  const auto refused = [](const std::string& message, const auto& change) {
    WorkerOptions options = testing::options_of("127.0.0.1:1", {});
    options.transport = "tcp";
    options.spec.name = "job";
    options.spec.keys = {{.name = "a", .elements = 32}};
    options.connect_timeout_ms = 1;
    change(options);
    expect_error(ErrorCode::kInvalid, message, [&] { Worker worker(options); });
  };
  refused("'fast' is not a rate", [](WorkerOptions& o) { o.nic_budget = "fast"; });
  refused("over transport 'shm' nothing is sent",
          [](WorkerOptions& o) { o.nic_budget = "1gbit", o.transport = "shm"; });
  refused("send_order must be priority, fifo, random or magnitude, got 'best'",
          [](WorkerOptions& o) { o.send_order = "best"; });
  refused("its consistency must be ssp or async", [](WorkerOptions& o) { o.carry_over = 1; });
  refused("those of key 'a' are bf16", [](WorkerOptions& o) {
    o.carry_over = 1, o.spec.consistency = "async", o.spec.gradient_dtype = "bf16";
  });
}

// Integers: every sum is exact. Rank 0 pushes random ones at a budget that is far too small, then
// zeros; rank 1 zeros all the time.
void carry(const std::string& format, uint32_t slack, uint64_t seed) {
  Box box(2);
  JobSpec spec;
  spec.name = "carried";
  spec.keys = {{.name = "a", .elements = 100'000}, {.name = "b", .elements = 5}};
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.consistency = "ssp";
  spec.slack = slack;
  spec.gradient_dtype = format;
  constexpr uint64_t kClocks = 8;
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.transport = "tcp";
    options.rank = static_cast<int32_t>(rank);
    if (rank == 0) options.nic_budget = "1500000";
    options.carry_over = 5;  // more than the slack
    options.send_order = "magnitude";
    Worker worker(options);
    worker.wait_all();
    std::mt19937 random(static_cast<uint32_t>(seed));
    // pushed[clock][key]: sums of what was pushed up to then.
    std::vector<std::vector<std::vector<float>>> pushed(
        1, {std::vector<float>(100'000), std::vector<float>(5)});
    for (uint64_t clock = 1; clock <= kClocks + slack; ++clock) {
      pushed.push_back(pushed.back());
      for (size_t key = 0; key < worker.keys(); ++key) {
        const std::span<float> gradient = worker.gradient(key);
        for (size_t i = 0; i < gradient.size(); ++i) {
          const bool zero = rank == 1 || clock > kClocks;
          gradient[i] = zero ? 0 : static_cast<float>(random() % 8);
          pushed.back()[key][i] += gradient[i];
        }
        worker.push(key);
      }
      worker.wait_all();
      if (rank == 1) continue;
      // Each chunk has all that was pushed up to a clock, which is not older than the slack.
      for (size_t key = 0; key < worker.keys(); ++key) {
        const std::span<const float> seen = worker.parameters(key);
        for (size_t begin = 0; begin < seen.size(); begin += spec.chunk_elements) {
          const size_t end = std::min(seen.size(), begin + spec.chunk_elements);
          bool found = false;
          for (uint64_t age = 0; age <= std::min<uint64_t>(slack, clock) && !found; ++age) {
            const std::vector<float>& sums = pushed[clock - age][key];
            found = std::equal(seen.begin() + begin, seen.begin() + end, sums.begin() + begin);
          }
          ASSERT_TRUE(found) << "key " << key << " from " << begin << " at clock " << clock;
        }
      }
    }
    worker.barrier();
    if (rank != 0) return;
    EXPECT_GT(worker.stats().chunks_carried_over, slack > 0 ? 10u : 0u);
    for (size_t key = 0; key < worker.keys(); ++key) {
      const std::span<const float> seen = worker.parameters(key);
      EXPECT_TRUE(std::ranges::equal(seen, pushed.back()[key])) << "key " << key;
    }
  });
}

TEST_F(Budget, WhatIsCarriedOverArrivesBeforeTheSlackEnds) { carry("f32", 2, seed_); }

// A box keeps ranks in step where each waits for all others. With a quorum those with a fast link
// go on while the first contribution of one with a slow link is under way, for 5 seconds.
TEST_F(Budget, WithAQuorumNobodyWaitsForASlowLink) {
  Box box(2);
  JobSpec spec;
  spec.name = "slow-link";
  spec.keys = {{.name = "a", .elements = 8'000'000}};
  spec.world_size = 3;
  spec.lease_ms = 60'000;
  spec.quorum = 2;
  spec.grace_ms = 1;
  std::atomic<bool> slow_is_through = false;
  double longest = 0, slow = 0;  // exchanges, in seconds
  each_rank(3, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.transport = "tcp";
    options.rank = static_cast<int32_t>(rank);
    if (rank == 2) options.nic_budget = "50mbit";
    Worker worker(options);
    worker.wait_all();
    worker.barrier();
    std::ranges::fill(worker.gradient(0), 1.0f);
    while (!slow_is_through) {
      const auto start = Clock::now();
      worker.push(0);
      worker.wait(0);
      if (rank == 0 && !slow_is_through) longest = std::max(longest, seconds_since(start));
      if (rank == 2) slow = seconds_since(start), slow_is_through = true;
      // So that the slow one is not late for so many rounds that it is lost.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  EXPECT_LT(longest, slow / 2);
}

// The values of int8 are integers here: a chunk's largest is 127 times a power of two, or less.
TEST_F(Budget, WhatACoderKeepsIsCarriedOverToo) {
  Box box(2);
  JobSpec spec;
  spec.name = "coded";
  spec.keys = {{.name = "a", .elements = 300'000}};
  spec.world_size = 1;
  spec.consistency = "async";
  spec.gradient_dtype = "int8";
  WorkerOptions options = box.options(spec);
  options.transport = "tcp";
  options.nic_budget = "1000000";
  options.carry_over = 3;
  Worker worker(options);
  worker.wait_all();
  std::mt19937 random(static_cast<uint32_t>(seed_));
  std::vector<double> pushed(300'000);
  for (uint64_t clock = 1; clock <= 40; ++clock) {
    const std::span<float> gradient = worker.gradient(0);
    for (size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = clock <= 10 ? static_cast<float>(random() % 100) : 0;
      pushed[i] += gradient[i];
    }
    worker.push(0);
    worker.wait(0);
  }
  EXPECT_GT(worker.stats().chunks_carried_over, 20u);
  const std::span<const float> seen = worker.parameters(0);
  for (size_t i = 0; i < seen.size(); ++i) ASSERT_NEAR(seen[i], pushed[i], 0.01) << i;
}

}  // namespace budget_test
}  // namespace phub
