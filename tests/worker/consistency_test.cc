// Jobs that are not in lock-step. Rank r adds 256^r in every update, so that a parameter says how
// many updates of each rank are in it: the bytes that a rank reads are its clocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"

namespace phub {
namespace consistency_test {

using testing::Box;
using testing::each_rank;

constexpr uint32_t kRanks = 3;
constexpr uint64_t kRounds = 60;

JobSpec spec_of(const std::string& consistency, uint32_t slack) {
  JobSpec spec;
  spec.name = consistency;
  spec.keys = {{.name = "large", .elements = 50'000}, {.name = "small", .elements = 5}};
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.consistency = consistency;
  spec.slack = slack;
  return spec;
}

float weight(uint32_t rank) { return static_cast<float>(1u << (8 * rank)); }
uint64_t clock_in(float parameter, uint32_t rank) {
  return (static_cast<uint32_t>(parameter) >> (8 * rank)) & 0xff;
}

// What `body(rank, clock, seen)` is told after each wait: the lowest of what every rank had pushed.
struct Race {
  std::array<std::atomic<uint64_t>, kRanks> pushed = {};
  std::atomic<uint64_t> largest_lead = 0;

  uint64_t slowest() const {
    uint64_t least = ~uint64_t{0};
    for (const auto& count : pushed) least = std::min<uint64_t>(least, count);
    return least;
  }
};

// One rank's run: pushes, waits, and looks at what came back. `oldest` is how many rounds behind
// its own the others' updates may be. Rank 0 uses the library's memory, rank 1 its own, rank 2 its
// own for gradients and results alike.
void run(Worker& worker, Race& race, uint64_t oldest, const std::function<void()>& between = {}) {
  const uint32_t rank = worker.rank();
  worker.wait_all();
  std::vector<std::vector<float>> gradients, results;
  for (size_t key = 0; key < worker.keys(); ++key) {
    std::ranges::fill(worker.gradient(key), weight(rank));
    if (rank == 0) continue;
    gradients.emplace_back(worker.gradient(key).size(), weight(rank));
    results.emplace_back(gradients[key].size());
    float* parameters = rank == 1 ? results[key].data() : gradients[key].data();
    worker.register_memory(key, {.gradient = gradients[key].data(), .parameters = parameters});
  }
  worker.wait_all();  // leaves there what is here, but in no gradient
  const uint64_t copied = worker.stats().bytes_copied;
  for (uint64_t clock = 1; clock <= kRounds; ++clock) {
    race.pushed[rank] = clock;
    for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
    worker.wait_all();
    const uint64_t lead = clock - std::min(clock, race.slowest());
    uint64_t most = race.largest_lead;
    while (most < lead && !race.largest_lead.compare_exchange_weak(most, lead)) {
    }
    ASSERT_LE(lead, oldest) << "rank " << rank << " at clock " << clock;
    for (size_t key = 0; key < worker.keys(); ++key) {
      const std::span<const float> seen = rank == 0   ? worker.parameters(key)
                                          : rank == 1 ? std::span<const float>(results[key])
                                                      : std::span<const float>(gradients[key]);
      const uint32_t chunk = worker.spec().chunk_elements;
      for (size_t i = 0; i < seen.size(); ++i) {
        ASSERT_EQ(seen[i], seen[i - i % chunk]) << "a chunk of two times: element " << i;
        if (i % chunk != 0) continue;
        ASSERT_EQ(clock_in(seen[i], rank), clock) << "rank " << rank << " misses its own updates";
        for (uint32_t other = 0; other < kRanks; ++other) {
          ASSERT_GE(clock_in(seen[i], other) + oldest, clock) << "of rank " << other;
          ASSERT_LE(clock_in(seen[i], other), race.pushed[other]) << "of rank " << other;
        }
      }
    }
    if (rank == 2) {
      for (std::vector<float>& gradient : gradients) std::ranges::fill(gradient, weight(rank));
    }
    if (between) between();
  }
  const bool in_place = worker.connection().starts_with("tcp");
  if (rank == 0 || (rank == 1 && in_place)) {
    EXPECT_EQ(worker.stats().bytes_copied, copied);
  }
}

class Consistency : public ::testing::TestWithParam<uint32_t> {};

TEST_P(Consistency, NobodyIsFurtherAheadThanTheSlack) {
  const uint32_t slack = GetParam();
  Box box(2);
  Race race;
  each_rank(kRanks, [&](uint32_t rank) {
    Worker worker(box.options(spec_of("ssp", slack), rank));
    const auto others_are_ahead = [&] {  // for as long as it takes them
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (race.largest_lead < slack && std::chrono::steady_clock::now() < limit) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    run(worker, race, slack, rank == 2 ? std::function<void()>(others_are_ahead) : nullptr);
    worker.barrier();
  });
  EXPECT_EQ(race.largest_lead, slack) << "the slack is there to be used: one rank is slow";
}
INSTANTIATE_TEST_SUITE_P(Slack, Consistency, ::testing::Values(0, 1, 5));

TEST(Async, NobodyWaitsForAStraggler) {
  Box box(2);
  Race race;
  std::atomic<bool> others_done = false;
  std::atomic<uint32_t> done = 0;
  each_rank(kRanks, [&](uint32_t rank) {
    Worker worker(box.options(spec_of("async", 0), rank));
    if (rank == 2) {
      worker.wait_all();
      while (!others_done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    run(worker, race, kRounds);
    if (++done == kRanks - 1) others_done = true;
    worker.barrier();
  });
  EXPECT_EQ(race.largest_lead, kRounds);
}

}  // namespace consistency_test
}  // namespace phub
