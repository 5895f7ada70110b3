// Rounds that go on without late ranks, at a real box: every result that a rank gets is what one
// process computes from the job's log.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/oracle/participation.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace quorum_test {

using testing::Box;
using testing::each_worker;

constexpr uint32_t kRanks = 4;

JobSpec spec_of(const std::string& optimizer) {
  JobSpec spec;
  spec.name = "late-" + optimizer;
  spec.keys = {{.name = "large", .elements = 30'000}, {.name = "small", .elements = 5}};
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;
  spec.optimizer = optimizer;
  spec.reduction = Reduction::kMean;
  spec.quorum = 2;
  spec.grace_ms = 2;
  return spec;
}

float gradient_of(uint64_t seed, uint32_t rank, uint64_t round, size_t element) {
  uint64_t hash = (seed * 1'000'003 + round * 8191 + rank * 131 + element) * 0x9e3779b97f4a7c15;
  hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9;
  return static_cast<float>((hash >> 32) % 2001) / 100 - 10;
}

// What ranks have seen: the results of a key and round, the same for all.
class Seen {
 public:
  void add(size_t key, uint64_t round, std::span<const float> result) {
    const std::lock_guard lock(mutex_);
    const auto [at, is_new] =
        results_.try_emplace({key, round}, std::vector<float>(result.begin(), result.end()));
    EXPECT_TRUE(is_new || std::ranges::equal(at->second, result)) << key << " of " << round;
  }
  void check(const JobSpec& spec, uint64_t seed, std::span<const LogRecord> log) const {
    const std::vector<ChunkPlace> places = chunks_of(spec);
    const Participation participation(log, static_cast<uint32_t>(places.size()));
    const HyperHistory hyper(spec, log);
    for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
      const uint64_t first = places[chunk].begin;
      Replay replay(spec, participation, hyper, chunk, std::vector<float>(places[chunk].elements),
                    [&](const Member& from, uint64_t round, std::byte* out) {
                      for (size_t i = 0; i < places[chunk].elements; ++i) {
                        const float value = gradient_of(seed, from.rank, round, first + i);
                        std::memcpy(out + i * sizeof value, &value, sizeof value);
                      }
                      return true;
                    });
      for (const auto& [at, result] : results_) {
        if (at.first != places[chunk].key) continue;
        while (replay.round() < at.second) replay.next_round();
        const auto begin = result.begin() + static_cast<ptrdiff_t>(first);
        EXPECT_TRUE(std::equal(replay.parameters().begin(), replay.parameters().end(), begin))
            << "chunk " << chunk << " of round " << at.second;
      }
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<size_t, uint64_t>, std::vector<float>> results_;  // by key and round
};

// Ranks are slow now and then, between keys and between rounds. Rank 0 never is, and each of the
// others is late sometimes.
TEST(Quorum, ResultsAreThoseOfTheRanksThatTheLogNames) {
  const testing::Seeds seeds = testing::fresh_seeds(1);
  for (const std::string optimizer : {"none", "adam"}) {
    const uint64_t seed = seeds.first;
    SCOPED_TRACE(seed);
    Box box;
    const JobSpec spec = spec_of(optimizer);
    Seen seen;
    constexpr uint64_t kRounds = 60;
    each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
      std::mt19937_64 random(seed + rank);
      uint64_t round = 0, jumps = 0;
      while (round < kRounds) {
        for (size_t key = 0; key < worker.keys(); ++key) {
          if (rank > 0 && random() % 6 == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
          }
          const std::span<float> gradient = worker.gradient(key);
          for (size_t i = 0; i < gradient.size(); ++i) {
            gradient[i] = gradient_of(seed, rank, round + 1, i);
          }
          worker.push(key);
        }
        worker.wait_all();
        const uint64_t before = std::exchange(round, worker.round(0));
        EXPECT_EQ(worker.round(1), round);
        jumps += round > before + 1 ? 1 : 0;
        for (size_t key = 0; key < worker.keys(); ++key) {
          seen.add(key, round, worker.parameters(key));
        }
      }
      EXPECT_TRUE(rank == 0 || jumps > 0) << "rank " << rank << " was never late";
    });
    const std::vector<LogRecord> log = box.log(spec.name);
    EXPECT_GT(std::ranges::count(log, LogRecord::Kind::kLate, &LogRecord::kind), 0);
    seen.check(spec, seed, log);
  }
}

// Nobody waits for a rank that does nothing but beat; the status says how often it was late.
TEST(Quorum, ARankThatHangsHoldsNobodyUpAndIsLostInTheEnd) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.grace_ms = 1;
  std::atomic<bool> over = false;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    if (rank == 3) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    uint64_t late = 0;
    while (worker.round(0) < 110) {
      for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
      worker.wait_all();
      if (rank > 0 || late > 0 || worker.round(0) < 50) continue;
      late = box.status().jobs.at(0).ranks.at(3).late;
      EXPECT_GT(late, 20u);
    }
    over = true;
  });
  const std::vector<LogRecord> log = box.log(spec.name);
  const auto lost = std::ranges::find(log, LogRecord::Kind::kLost, &LogRecord::kind);
  ASSERT_NE(lost, log.end());
  EXPECT_EQ(lost->rank, 3u);
  EXPECT_NE(lost->reason.find("late for 100 rounds"), std::string::npos) << lost->reason;
}

// Two have sent the round, and wait for its grace, when one of them is lost. Then there is no
// quorum any more, and the rank that sends nothing is waited for, up to the progress limit.
TEST(Quorum, ASenderThatIsLostLeavesTheOthersToTheProgressLimit) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.world_size = 3;
  spec.grace_ms = 4000;
  spec.progress_limit_ms = 500;
  std::atomic<bool> over = false;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    if (rank == 2) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return worker.abandon();
    }
    worker.wait_all();
    over = true;
  });
  const std::vector<LogRecord> log = box.log(spec.name);
  EXPECT_EQ(std::ranges::count(log, LogRecord::Kind::kLate, &LogRecord::kind), 0);
  EXPECT_TRUE(std::ranges::any_of(log, [](const LogRecord& record) {
    return record.kind == LogRecord::Kind::kLost && record.rank == 2 &&
           record.reason.find("sent nothing") != std::string::npos;
  }));
}

TEST(Quorum, ItsGraceIsOnlyWaitedForWhenARankIsLate) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.grace_ms = 60'000;
  each_worker(box, spec, [&](Worker& worker, uint32_t) {
    for (int step = 0; step < 20; ++step) {
      for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
      worker.wait_all();
      EXPECT_EQ(worker.round(0), static_cast<uint64_t>(step) + 1);
    }
    worker.barrier();
  });
}

TEST(Quorum, OptionsThatContradictItAreRefused) {
  Box box;
  const auto refused = [&](const std::string& text, auto change) {
    JobSpec spec = spec_of("none");
    spec.world_size = 1, spec.quorum = 1;
    change(spec);
    testing::expect_error(ErrorCode::kInvalid, text, [&] { Worker worker(box.options(spec)); });
  };
  refused("quorum: must be", [](JobSpec& spec) { spec.quorum = 2; });
  refused("has no quorum", [](JobSpec& spec) { spec.quorum = 0; });
  refused("on_loss 'wait'", [](JobSpec& spec) { spec.on_loss = OnLoss::kWait; });
  refused("quorum 1: it is about rounds", [](JobSpec& spec) { spec.consistency = "async"; });
}

}  // namespace quorum_test
}  // namespace phub
