// Rounds that go on without late ranks, at a real box: every result that a rank gets is what one
// process computes from the job's log.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "phub/checkpoint/store.h"
#include "phub/job/quorum_grace.h"
#include "tests/oracle/participation.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
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

// Of a push, in a job with weights.
float weight_of(uint64_t seed, uint32_t rank, uint64_t round, size_t key) {
  constexpr float kWeights[] = {1, 0.1f, 3, 1000.5f, 7.0f / 3};
  return kWeights[(seed + round * 3 + rank * 7 + key) % std::size(kWeights)];
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
  // A standby has saved the results of the latest round of all keys.
  void check_saved(const JobSpec& spec, Checkpoints at) const {
    const CheckpointId id = at.list(spec.name).at(0);
    EXPECT_GE(id.round, 40u);
    const auto reader = at.open(spec.name, id);
    for (size_t key = 0; key < spec.keys.size(); ++key) {
      std::vector<float> saved(spec.keys[key].elements);
      reader->read_tensor(kParametersFile, key, 0, std::as_writable_bytes(std::span(saved)));
      EXPECT_TRUE(saved == std::prev(results_.upper_bound({key, id.round}))->second)
          << "key " << key << " of round " << id.round;
    }
  }
  void check(const JobSpec& spec, uint64_t seed, std::span<const LogRecord> log) const {
    const std::vector<ChunkPlace> places = chunks_of(spec);
    const Participation participation(log, static_cast<uint32_t>(places.size()),
                                      fragments_by_chunk(spec, places));
    const HyperHistory hyper(spec, log);
    for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
      const uint64_t first = places[chunk].begin;
      Replay replay(
          spec, participation, hyper, chunk, std::vector<float>(places[chunk].elements),
          [&](const Member& from, uint64_t round, std::byte* out) {
            for (size_t i = 0; i < places[chunk].elements; ++i) {
              const float value = gradient_of(seed, from.rank, round, first + i);
              std::memcpy(out + i * sizeof value, &value, sizeof value);
            }
            return true;
          },
          {},
          [&](const Member& from, uint64_t round) {
            return weight_of(seed, from.rank, round, places[chunk].key);
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
void expect_what_the_log_says(Box& box, const JobSpec& spec, uint64_t seed, Seen& seen) {
  SCOPED_TRACE(fmt::format("PHUB_SEED={}: {} weights {} late_decay {}", seed, spec.optimizer,
                           spec.weights.word(), spec.late_decay));
  constexpr uint64_t kRounds = 60;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    std::mt19937_64 random(seed + rank);
    uint64_t round = 0, jumps = 0;
    while (round < kRounds) {
      for (size_t key = 0; key < worker.keys(); ++key) {
        if (rank > 0 && random() % 6 == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
        }
        if (spec.weights == Weights::kYes) {
          worker.set_weight(weight_of(seed, rank, round + 1, key));
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

// Each key is a fragment. Ranks go through them in one order, and wait for the result of one before
// they send the next; a rank may be late at one of them alone.
void expect_what_the_log_says_of_fragments(Box& box, const JobSpec& spec, uint64_t seed,
                                           const std::string& transport, Seen& seen) {
  SCOPED_TRACE(fmt::format("PHUB_SEED={}: {} ranks, quorum {}, {} over {}", seed, spec.world_size,
                           spec.quorum, spec.optimizer, transport));
  std::atomic<uint64_t> jumps = 0;
  each_worker(
      box, spec,
      [&](Worker& worker, uint32_t rank) {
        std::mt19937_64 random(seed + rank);
        while (worker.round(0) < 40) {
          for (size_t key = 0; key < worker.keys(); ++key) {
            if (rank > 0 && random() % 6 == 0) {
              std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
            }
            const uint64_t before = worker.round(key);
            const std::span<float> gradient = worker.gradient(key);
            for (size_t i = 0; i < gradient.size(); ++i) {
              gradient[i] = gradient_of(seed, rank, before + 1, i);
            }
            worker.push(key);
            worker.wait(key);
            jumps += worker.round(key) > before + 1 ? 1 : 0;
            seen.add(key, worker.round(key), worker.parameters(key));
          }
        }
      },
      transport);
  EXPECT_TRUE(spec.quorum == spec.world_size || jumps > 0) << "nobody was ever late";
  seen.check(spec, seed, box.log(spec.name));
}

TEST(Quorum, ARankIsLateInOneFragmentAndNotInAnother) {
  std::mt19937_64 random(testing::fresh_seeds(1).first);
  for (const std::string transport : {"shm", "tcp"}) {
    for (const uint32_t ranks : {2, 4}) {
      JobSpec spec = spec_of(random() % 2 == 0 ? "adam" : "momentum");
      spec.keys.push_back({.name = "third", .elements = 20'000});
      for (uint32_t key = 0; key < spec.keys.size(); ++key) spec.keys[key].fragment = key;
      spec.world_size = ranks;
      spec.quorum = static_cast<uint32_t>(1 + random() % ranks);
      spec.late_decay = random() % 2 == 0 ? 0.5 : 1;
      Box box;
      Seen seen;
      expect_what_the_log_says_of_fragments(box, spec, random(), transport, seen);
    }
  }
}

// A source, and the standby that has what it has.
class Pair {
 public:
  Box& source() { return source_; }
  Checkpoints saved() {  // once no job is there
    EXPECT_TRUE(standby_.becomes_empty());
    return Checkpoints(folder_);
  }

 private:
  const TemporaryDirectory directory_;
  const std::string folder_ = directory_.path() + "/standby";
  Box standby_{"pack:1 core:3 pu:1",
               uint64_t{1} << 33,
               {},
               {.folder = folder_},
               "",
               nullptr,
               {.transport = "", .standby_of = "the source"}};
  Box source_{"pack:2 core:2 pu:1",
              uint64_t{1} << 33,
              {},
              {},
              standby_.address(),
              nullptr,
              {.transport = "", .is_standby = true}};
};

TEST(Quorum, TheStandbyHasTheSameBits) {
  std::mt19937_64 random(testing::fresh_seeds(1).first);
  for (const double decay : {1.0, 0.75, 0.0}) {
    Pair pair;
    JobSpec spec = spec_of("adam");
    spec.quorum = decay == 0 ? 1 : 2;
    spec.late_decay = decay;
    spec.weights = random() % 2 == 0 ? Weights::kYes : Weights::kNo;
    Seen seen;
    expect_what_the_log_says(pair.source(), spec, random(), seen);
    seen.check_saved(spec, pair.saved());
  }
  Pair pair;
  JobSpec spec = spec_of("momentum");
  for (uint32_t key = 0; key < spec.keys.size(); ++key) spec.keys[key].fragment = key;
  Seen seen;
  expect_what_the_log_says_of_fragments(pair.source(), spec, random(), "tcp", seen);
  seen.check_saved(spec, pair.saved());
}

// Each rank goes through the fragments in orders of its own. They meet where they can, and where
// all wait, each at another fragment, a round ends with fewer.
void expect_no_deadlock(Box& box, const std::string& optimizer) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  JobSpec spec = spec_of(optimizer);
  spec.keys.clear();
  for (uint32_t f = 0; f < 4; ++f) {
    spec.keys.push_back({.name = fmt::format("key{}", f), .elements = 64, .fragment = f});
  }
  spec.quorum = 3;
  spec.progress_limit_ms = 1200;
  std::atomic<uint32_t> ended = 0;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    std::mt19937_64 random(seed + rank);
    std::vector<size_t> order = {0, 1, 2, 3};
    for (int cycle = 0; cycle < 2; ++cycle) {
      std::ranges::shuffle(order, random);
      for (const size_t key : order) {
        worker.push_null(key);
        worker.wait(key);
      }
    }
    ++ended;
  });
  EXPECT_EQ(ended, kRanks);
}

TEST(Quorum, NoOrderOfTheFragmentsIsADeadlock) {
  Box box;
  expect_no_deadlock(box, "none");
}

TEST(Quorum, NoOrderOfTheFragmentsIsADeadlockWithAStandby) {
  Pair pair;
  expect_no_deadlock(pair.source(), "sgd");
}

// Two have made fragment 0's round without the third. One of them is lost, the other is at fragment
// 1, and what the third has sent to fragment 0 is for the next round.
TEST(Quorum, RanksAtDifferentFragmentsGoOnWhenOneOfAQuorumIsLost) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.keys[1].fragment = 1;
  spec.world_size = 3;
  spec.progress_limit_ms = 20'000;
  std::atomic<bool> late = false;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    if (rank == 2) {
      while (!late) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (size_t key = 0; key < 2 * worker.keys(); ++key) {
      worker.push_null(key % 2);
      worker.wait(key % 2);
      late = true;
      if (rank == 1) return worker.abandon();
    }
  });
  const std::vector<LogRecord> log = box.log(spec.name);
  for (const LogRecord& record : log) {
    EXPECT_FALSE(record.kind == LogRecord::Kind::kLost && record.rank != 1) << record.reason;
  }
}

// Fragment 1 is a round behind when the others have sent all that they have. They wait in a barrier
// for the one that joins then, which waits for that round.
TEST(Quorum, ANewcomerDoesNotWaitForARoundOfThoseThatAreInABarrier) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.keys[1].fragment = 1;
  spec.world_size = spec.quorum = 2;
  spec.max_ranks = 3;
  spec.progress_limit_ms = 1200;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    for (const size_t key : {0, 1, 0}) {
      worker.push_null(key);
      worker.wait(key);
    }
    if (rank == 1) return worker.barrier();
    WorkerOptions options = box.options(spec, 2);
    options.wait_timeout_ms = 10'000;
    std::thread joins([&] {
      Worker newcomer(options);
      EXPECT_NO_THROW(newcomer.wait_all());
      EXPECT_EQ(newcomer.round(1), 2u);
      if (newcomer.test(1)) newcomer.barrier();
    });
    const auto is_in = [&box] {
      const std::vector<RankStatus> ranks = box.status().jobs.front().ranks;
      return ranks.size() == 3 && ranks[2].state == "live";
    };
    while (!is_in()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    worker.barrier();
    joins.join();
  });
}

TEST(Quorum, ResultsAreThoseOfTheRanksThatTheLogNames) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  for (const std::string optimizer : {"none", "adam"}) {
    Box box;
    Seen seen;
    expect_what_the_log_says(box, spec_of(optimizer), seed, seen);
  }
}

// A quorum of one may consist of a rank whose contribution is dropped: then nothing changes.
TEST(Quorum, LateContributionsCountLessOrNotAtAll) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  for (const double decay : {0.75, 0.0}) {
    for (const Weights weights : {Weights::kNo, Weights::kYes}) {
      JobSpec spec = spec_of(weights == Weights::kYes ? "adam" : "sgd");
      spec.quorum = decay == 0 ? 1 : 2;
      spec.late_decay = decay;
      spec.weights = weights;
      spec.keys[1].elements = 4500;
      spec.keys[1].format = weights == Weights::kYes ? "topk-10" : "int8";
      Box box;
      Seen seen;
      expect_what_the_log_says(box, spec, seed, seen);
    }
  }
}

// The others come within a few ms of the quorum, and one of them long after it.
TEST(Quorum, TheGraceIsChosenByWhatWasMeasured) {
  Box box;
  JobSpec spec = spec_of("none");
  spec.grace_ms = 0;
  spec.grace = Grace::kAuto;
  std::atomic<bool> over = false;
  std::string remark;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    while (!over) {
      const std::chrono::milliseconds takes{rank < 2 ? 60 : rank == 2 ? 65 : 200};
      std::this_thread::sleep_for(takes);
      for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
      worker.wait_all();
      if (rank > 0 || worker.round(0) < 25) continue;
      const JobStatus status = box.status().jobs.at(0);
      const auto at = std::ranges::find(status.remarks, "grace", &Remark::subject);
      if (at != status.remarks.end()) remark = at->text;
      over = true;
    }
  });
  const std::vector<LogRecord> log = box.log(spec.name);
  const auto late = [&](uint32_t rank) {
    return std::ranges::count_if(log, [rank](const LogRecord& record) {
      return record.kind == LogRecord::Kind::kLate && record.rank == rank && record.round > 12;
    });
  };
  EXPECT_GT(late(3), 0) << "it is not waited for";
  EXPECT_LE(late(2), 4) << "it is";
  EXPECT_NE(remark.find("rounds wait up to "), std::string::npos) << remark;
}

TEST(QuorumGrace, IsOfThoseWhoAreALittleSlower) {
  constexpr uint64_t kMs = 1'000'000;
  const std::vector<uint64_t> rounds = {90 * kMs, 100 * kMs, 1000 * kMs};  // a quarter: 25
  EXPECT_EQ(quorum_grace_ms({}, rounds, 0), 0u);
  EXPECT_EQ(quorum_grace_ms({5 * kMs}, {}, 0), 0u);
  EXPECT_EQ(quorum_grace_ms({5 * kMs}, rounds, 0), 5u);
  EXPECT_EQ(quorum_grace_ms({5 * kMs + 1}, rounds, 0), 6u);
  EXPECT_EQ(quorum_grace_ms({5 * kMs, 26 * kMs}, rounds, 0), 5u) << "that one is too slow";
  EXPECT_EQ(quorum_grace_ms({5 * kMs, 25 * kMs}, rounds, 0), 25u);
  EXPECT_EQ(quorum_grace_ms({5 * kMs, 25 * kMs}, rounds, 20), 5u) << "it is bounded";
  EXPECT_EQ(quorum_grace_ms({26 * kMs}, rounds, 0), 0u) << "nobody is worth the wait";
  EXPECT_EQ(quorum_grace_ms({kMs / 5, kMs / 2}, {kMs}, 0), 1u) << "0.2 ms, rounded up";
  EXPECT_EQ(quorum_grace_ms({kMs / 2}, {kMs}, 0), 0u) << "half of a short round is long";
  std::vector<uint64_t> many(20, 2 * kMs);
  many[7] = many[13] = 24 * kMs;
  EXPECT_EQ(quorum_grace_ms(many, rounds, 0), 2u) << "nine of ten";
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
  refused("late_decay: it is about",
          [](JobSpec& spec) { spec.quorum = spec.grace_ms = 0, spec.late_decay = 0.5; });
  refused("grace 'auto': it is about",
          [](JobSpec& spec) { spec.quorum = spec.grace_ms = 0, spec.grace = Grace::kAuto; });
  for (const double decay : {-0.1, 1.5, std::nan("")}) {
    refused("late_decay: must be from 0 to 1", [&](JobSpec& spec) { spec.late_decay = decay; });
  }
  refused("on_loss 'wait'", [](JobSpec& spec) { spec.on_loss = OnLoss::kWait; });
  refused("of fragment 2, and no key of fragment 1",
          [](JobSpec& spec) { spec.keys[1].fragment = 2; });
  refused("fragment: must be from 0 to 255", [](JobSpec& spec) { spec.keys[1].fragment = 256; });
  refused("quorum 1: it is about rounds", [](JobSpec& spec) { spec.consistency = "async"; });
}

}  // namespace quorum_test
}  // namespace phub
