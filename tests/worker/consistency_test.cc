// Jobs that are not in lock-step. Rank r adds 256^r in every update, so that a parameter says how
// many updates of each rank are in it: the bytes that a rank reads are its clocks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/coded.h"
#include "tests/oracle/reference.h"
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
    WorkerOptions options = box.options(spec_of("ssp", slack));
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
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
    WorkerOptions options = box.options(spec_of("async", 0));
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
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

// A rank that leaves is not waited for.
TEST(Ssp, WhoLeavesHoldsNobodyUp) {
  Box box(2);
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec_of("ssp", 2));
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.wait_all();
    worker.barrier();
    if (rank == 1) return worker.leave();
    for (int round = 0; round < 20; ++round) {
      worker.push(0);
      worker.push(1);
      worker.wait_all();
    }
  });
}

// The gradient of one element.
float gradient_of(uint64_t update, size_t element) {
  return static_cast<float>((update * 7919 + element * 104729) % 2001) / 500.0f - 2;
}

std::vector<float> initial_parameters(uint64_t elements) {
  std::vector<float> initial(elements);
  for (size_t i = 0; i < elements; ++i) initial[i] = gradient_of(0, i);
  return initial;
}

struct Format {
  const char* optimizer;
  const char* gradient;
  const char* parameter;
};
class OneByOne : public ::testing::TestWithParam<Format> {};

// Updates that come one after another, from whichever rank, are steps of one optimizer: the same
// bits as one worker in lock-step that makes them all.
TEST_P(OneByOne, EqualsOneWorkerInLockStep) {
  const Format format = GetParam();
  constexpr uint64_t kUpdates = 12, kElements = 20'001;
  const auto job = [&](const char* consistency, uint32_t ranks) {
    JobSpec spec;
    spec.name = consistency;
    spec.keys = {{.name = "key", .elements = kElements}};
    spec.world_size = ranks;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    spec.consistency = consistency;
    spec.optimizer = format.optimizer;
    spec.gradient_dtype = format.gradient;
    spec.parameter_dtype = format.parameter;
    spec.initial = "broadcast";
    if (spec.optimizer != "none") spec.hyper = {{"lr", 0.05}, {"weight_decay", 0.01}};
    return spec;
  };
  const auto fill = [&](Worker& worker, uint64_t update) {
    std::vector<float> gradient(kElements);
    for (size_t i = 0; i < kElements; ++i) gradient[i] = gradient_of(update, i);
    kernels::convert(gradient.data(), kernels::DType::kF32, worker.gradient_bytes(0).data(),
                     *kernels::parse_dtype(format.gradient), kElements);
  };
  const auto bytes = [](Worker& worker) {
    const std::span<const std::byte> result = worker.parameter_bytes(0);
    return std::vector<std::byte>(result.begin(), result.end());
  };
  const std::vector<float> initial = initial_parameters(kElements);
  Box box(2);

  std::vector<std::byte> expected;
  {
    Worker worker(box.options(job("bsp", 1)));
    worker.broadcast(initial);
    for (uint64_t update = 1; update <= kUpdates; ++update) {
      fill(worker, update);
      worker.push(0);
      worker.wait(0);
    }
    expected = bytes(worker);
  }

  std::atomic<uint64_t> turn = 1;
  std::vector<std::byte> last;
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(job("async", 2));
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.broadcast(initial);
    for (uint64_t update = rank + 1; update <= kUpdates; update += 2) {
      fill(worker, update);
      while (turn != update) std::this_thread::yield();
      worker.push(0);
      worker.wait(0);
      if (update == kUpdates) last = bytes(worker);
      ++turn;
    }
    worker.barrier();
  });
  EXPECT_TRUE(last == expected);
}
INSTANTIATE_TEST_SUITE_P(Optimizers, OneByOne,
                         ::testing::Values(Format{"sgd", "f32", "f32"},
                                           Format{"nesterov", "f32", "bf16"},
                                           Format{"adam", "bf16", "f32"},
                                           Format{"adagrad", "f16", "f16"}));

// Updates of coded gradients are steps of what is sent, and each rank has residuals of its own.
TEST(Consistency, CodedUpdatesAreSteps) {
  constexpr uint64_t kUpdates = 12, kElements = 20'001;
  Box box(2);
  for (const char* consistency : {"async", "ssp"}) {
    for (const char* format : {"fp8-e4m3", "int32", "int4", "topk"}) {
      SCOPED_TRACE(fmt::format("{} {}", consistency, format));
      JobSpec spec;
      spec.name = fmt::format("{}-{}", consistency, format);
      spec.keys = {{.name = "plain", .elements = 100},
                   {.name = "coded", .elements = kElements, .format = format}};
      spec.world_size = 2;
      spec.lease_ms = 60'000;  // nobody is to be lost for being slow
      spec.consistency = consistency;
      if (spec.consistency == "ssp") spec.slack = 2;
      spec.optimizer = "nesterov";
      spec.rounding = "stochastic";
      spec.hyper = {{"lr", 0.05}};
      const auto gradient_of_update = [](uint64_t update) {
        std::vector<float> gradient(kElements);
        for (size_t i = 0; i < kElements; ++i) gradient[i] = gradient_of(update, i);
        return gradient;
      };
      kernels::Hyper hyper = kernels::default_hyper(kernels::Optimizer::kNesterov);
      hyper.lr = 0.05;
      reference::Model model(kernels::Optimizer::kNesterov, hyper, std::vector<float>(kElements));
      CodedRank senders[] = {{spec, 0}, {spec, 1}};
      for (uint64_t update = 1; update <= kUpdates; ++update) {
        const uint64_t round = (update + 1) / 2;
        model.step(senders[(update + 1) % 2].send(1, round, gradient_of_update(update)));
      }

      std::atomic<uint64_t> turn = 1;
      each_rank(2, [&](uint32_t rank) {
        WorkerOptions options = box.options(spec);
        options.rank = static_cast<int32_t>(rank);
        Worker worker(options);
        worker.wait_all();
        for (uint64_t update = rank + 1; update <= kUpdates; update += 2) {
          std::ranges::copy(gradient_of_update(update), worker.gradient(1).begin());
          while (turn != update) std::this_thread::yield();
          worker.push_null(0);
          worker.push(1);
          worker.wait_all();
          if (update == kUpdates) {
            EXPECT_TRUE(std::ranges::equal(worker.parameters(1), model.params));
          }
          ++turn;
        }
        worker.barrier();
      });
    }
  }
}

TEST(ConsistencyBadInput, IsRefused) {
  Box box(1);
  const auto refusal = [&](JobSpec spec) -> std::string {
    try {
      const Worker worker(box.options(std::move(spec)));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid);
      return error.what();
    }
    return "accepted";
  };
  JobSpec spec = spec_of("async", 3);
  EXPECT_EQ(refusal(spec), "slack 3: it is for consistency ssp, and job '" + spec.name +
                               "' has consistency 'async'; change one of them");
}

}  // namespace consistency_test
}  // namespace phub
