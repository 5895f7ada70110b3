// A store of several ranks and threads reads what one thread computes over flat arrays: with all
// types and operations, settings, and ways in which the accesses become known.
#include "worker/iterstore/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/iterstore/programs.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub::iterstore {
namespace store_test {

using phub::testing::Box;
using phub::testing::Call;
using phub::testing::Calls;
using phub::testing::each_rank;
using phub::testing::expect_error;
using phub::testing::like;
using phub::testing::Oracle;
using phub::testing::some_calls;
using phub::testing::some_tables;
using phub::testing::Words;

enum class Gather { kNever, kVirtual, kReal };

// Iterations between which the pattern may change; each is one or two clocks.
struct Phase {
  Gather gather = Gather::kNever;
  uint32_t clocks = 1;                               // of an iteration
  std::vector<std::vector<std::vector<Calls>>> of;   // by rank, thread, clock: as recorded
  std::vector<std::vector<std::vector<Calls>>> run;  // the same, of all iterations
};

struct Scene {
  StoreOptions options;
  uint32_t ranks = 1;
  std::vector<Phase> phases;
};

template <class Make>
std::vector<std::vector<std::vector<Calls>>> for_each_thread(const Scene& scene, Make make) {
  std::vector<std::vector<std::vector<Calls>>> all(scene.ranks);
  for (uint32_t r = 0; r < scene.ranks; ++r) {
    for (uint32_t t = 0; t < scene.options.threads; ++t) all[r].push_back(make(r, t));
  }
  return all;
}

Scene some_scene(uint64_t seed) {
  std::mt19937_64 random(seed);
  Scene scene;
  scene.ranks = static_cast<uint32_t>(1 + random() % 4);
  StoreOptions& options = scene.options;
  options.threads = static_cast<uint32_t>(1 + random() % 3);
  options.tables = some_tables(random);
  if (options.tables.empty()) options.tables = {{.name = "only", .rows = 10}};
  options.placement = random() % 4 > 0;
  options.numa = random() % 4 > 0;
  options.static_index = random() % 4 > 0;
  options.batches = static_cast<uint32_t>(1 + random() % 10);
  if (options.static_index) options.gather_again = std::vector{0.0, 0.01, 0.3}[random() % 3];
  options.push_early = options.static_index && random() % 2 == 0;
  const bool strays = random() % 2 == 0;
  for (uint64_t phases = 1 + random() % 3; phases > 0; --phases) {
    Phase& phase = scene.phases.emplace_back();
    // Phases have other calls: what is fixed already, and not recorded again, is strayed from.
    phase.gather = random() % 3 == 0   ? Gather::kNever
                   : random() % 2 == 0 ? Gather::kVirtual
                                       : Gather::kReal;
    phase.clocks = static_cast<uint32_t>(1 + random() % 2);
    const uint32_t shares = scene.ranks * options.threads;
    phase.of = for_each_thread(scene, [&](uint32_t r, uint32_t t) {
      std::vector<Calls> clocks(phase.clocks);
      for (Calls& calls : clocks) {
        calls = some_calls(options.tables, r * options.threads + t, shares, random);
      }
      return clocks;
    });
    const uint64_t iterations = 1 + random() % 6;
    phase.run = for_each_thread(scene, [&](uint32_t r, uint32_t t) {
      std::vector<Calls> clocks;
      for (uint64_t c = 0; c < iterations * phase.clocks; ++c) {
        const Calls& recorded = phase.of[r][t][c % phase.clocks];
        const bool first = phase.gather == Gather::kReal && c < phase.clocks;
        clocks.push_back(first ? recorded : like(recorded, options.tables, strays, random));
      }
      return clocks;
    });
  }
  return scene;
}

// What every thread must see, clock by clock: by phase, rank, thread.
using Seen = std::vector<std::vector<std::vector<std::vector<std::vector<Words>>>>>;

Seen alone(const Scene& scene, Oracle& oracle) {
  Seen seen;
  for (const Phase& phase : scene.phases) {
    auto& of_phase = seen.emplace_back(scene.ranks);
    for (uint32_t r = 0; r < scene.ranks; ++r) of_phase[r].resize(scene.options.threads);
    for (size_t c = 0; c < phase.run[0][0].size(); ++c) {
      for (uint32_t r = 0; r < scene.ranks; ++r) {
        for (uint32_t t = 0; t < scene.options.threads; ++t) {
          of_phase[r][t].push_back(oracle.run(r, t, phase.run[r][t][c]));
        }
      }
      oracle.clock();
    }
  }
  return seen;
}

void run_thread(Store& store, const Scene& scene, uint32_t rank, uint32_t thread, const Seen& want,
                uint64_t seed) {
  StoreThread mine(store, thread);
  const auto& tables = scene.options.tables;
  for (size_t p = 0; p < scene.phases.size(); ++p) {
    const Phase& phase = scene.phases[p];
    if (phase.gather == Gather::kVirtual) {
      mine.begin_virtual();
      for (const Calls& calls : phase.of[rank][thread]) {
        phub::testing::run(mine, tables, calls);
        mine.clock();
      }
      mine.finish();
    }
    if (phase.gather == Gather::kReal) mine.begin_gathering();
    const std::vector<Calls>& clocks = phase.run[rank][thread];
    for (size_t c = 0; c < clocks.size(); ++c) {
      const std::vector<Words> got = phub::testing::run(mine, tables, clocks[c]);
      EXPECT_EQ(got, want[p][rank][thread][c])
          << "seed " << seed << ", rank " << rank << ", thread " << thread << ", clock " << c;
      mine.clock();
      if (phase.gather == Gather::kReal && c + 1 == phase.clocks) mine.finish();
    }
  }
}

void expect_tables(Store& store, const Scene& scene, const Oracle& oracle, uint64_t seed) {
  for (uint32_t t = 0; t < scene.options.tables.size(); ++t) {
    const std::vector<std::byte> got = store.table(t);
    const Words& want = oracle.table(t);
    ASSERT_EQ(got.size(), want.size() * 4);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size()), 0)
        << "seed " << seed << ", table " << scene.options.tables[t].name;
  }
}

void each_thread(uint32_t threads, const std::function<void(uint32_t thread)>& body) {
  each_rank(threads, body);
}

WorkerOptions worker_options(const Box& box, const std::string& name, uint32_t rank,
                             uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.chunk_elements = 64;
  WorkerOptions options = box.options(spec);
  options.rank = static_cast<int32_t>(rank);
  return options;
}

TEST(Store, ReadsWhatOneThreadComputes) {
  const auto seeds = phub::testing::fresh_seeds(phub::testing::scaled(20));
  Box box("pack:2 core:2 pu:1");
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const Scene scene = some_scene(seed);
    Oracle oracle(scene.options.tables);
    const Seen want = alone(scene, oracle);
    each_rank(scene.ranks, [&](uint32_t rank) {
      StoreOptions options = scene.options;
      options.worker = worker_options(box, fmt::format("any{}", seed), rank, scene.ranks);
      Store store(options);
      each_thread(options.threads,
                  [&](uint32_t t) { run_thread(store, scene, rank, t, want, seed); });
      expect_tables(store, scene, oracle, seed);
    });
    if (HasFailure()) return;
  }
}

// A store of each rank, with one thread, which body() gets.
void each_store(const Box& box, const std::string& name, uint32_t ranks,
                const StoreOptions& options,
                const std::function<void(Store& store, StoreThread& mine, uint32_t rank)>& body) {
  each_rank(ranks, [&](uint32_t rank) {
    StoreOptions of_rank = options;
    const JobSpec& spec = options.worker.spec;
    of_rank.worker = worker_options(box, name, rank, ranks);
    of_rank.worker.spec.consistency = spec.consistency;
    of_rank.worker.spec.slack = spec.slack;
    if (!options.worker.nic_budget.empty()) {
      of_rank.worker.transport = options.worker.transport;
      of_rank.worker.nic_budget = options.worker.nic_budget;
    }
    Store store(of_rank);
    {
      StoreThread mine(store, 0);
      body(store, mine, rank);
    }
  });
}

constexpr uint64_t kRows = 4096;  // 64 chunks

// Every second row, updated and read.
void iterate(StoreThread& mine, uint32_t rank) {
  for (uint64_t row = rank; row < kRows; row += 2) {
    mine.update(0, row, static_cast<int32_t>(row));
    mine.read<int32_t>(0, row);
  }
  mine.clock();
}

uint64_t chunks_in_ten_clocks(const Box& box, const std::string& name, bool fixed, bool placement) {
  std::atomic<uint64_t> chunks = 0;
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = fixed}};
  options.placement = placement;
  each_store(box, name, 2, options, [&](Store& store, StoreThread& mine, uint32_t rank) {
    mine.begin_virtual();
    iterate(mine, rank);
    mine.finish();
    const uint64_t before = store.stats().worker.chunks_received;
    for (int clock = 0; clock < 10; ++clock) iterate(mine, rank);
    EXPECT_EQ(mine.read<int32_t>(0, 100 + rank), 10 * (100 + static_cast<int32_t>(rank)));
    mine.clock();  // all of the ten are here
    if (rank == 0) chunks = store.stats().worker.chunks_received - before;
  });
  return chunks;
}

TEST(Store, RowsTravelToThoseThatUseThem) {
  Box box(2);
  const uint64_t narrow = chunks_in_ten_clocks(box, "narrow", true, true);
  EXPECT_GE(narrow, 320U);
  EXPECT_LE(narrow, 400U);
  EXPECT_GE(chunks_in_ten_clocks(box, "wide", false, true), 640U);
  EXPECT_GE(chunks_in_ten_clocks(box, "in-order", true, false), 640U);
}

// The bytes of a job's gradients and results, as its box says them later: it has counted some, and
// no more.
uint64_t bytes_of_job(Box& box, const std::string& name) {
  uint64_t bytes = 0, before = ~uint64_t{0};
  while (bytes == 0 || bytes != before) {
    before = bytes;
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // it is counted now and then
    for (const JobStatus& job : box.status().jobs) {
      if (job.name == name) bytes = job.flow.bytes_in + job.flow.bytes_out;
    }
  }
  return bytes;
}

// Out of lock-step: two ranks update each a 100th of the rows, of which they share a few. Only
// those travel, and the chunks of them come back. A second thread of each updates one of these rows
// that it has not recorded.
TEST(Store, OutOfLockStepFewRowsTravel) {
  constexpr uint64_t kAll = 40'000, kOfRank = kAll / 100, kClocks = 20;
  Box box(2);
  for (const char* consistency : {"ssp", "async"}) {
    std::atomic<uint64_t> at_first = 0, bytes = 0;
    each_rank(2, [&](uint32_t rank) {
      StoreOptions options;
      options.tables = {{.name = "t", .rows = kAll, .type = "i64"}};
      options.worker = worker_options(box, consistency, rank, 2);
      options.worker.transport = "tcp";
      options.worker.spec.consistency = consistency;
      options.threads = 2;
      Store store(options);
      const auto clock = [&](StoreThread& mine) {
        for (uint64_t i = 0; i < kOfRank; ++i) {
          const uint64_t row = (i * 100 + (i % 10 == 0 ? 0 : 3 * rank)) % kAll;
          mine.update(0, row, int64_t{1});
          mine.read<int64_t>(0, row);
        }
        mine.clock();
      };
      const auto clock_of_other = [](StoreThread& other) {
        if (!other.is_virtual()) other.update(0, 0, int64_t{1});
        other.clock();
      };
      const auto run = [&](uint64_t clocks) {
        each_thread(2, [&](uint32_t thread) {
          StoreThread mine(store, thread);
          if (clocks == 0) mine.begin_virtual();
          for (uint64_t c = 0; c < std::max<uint64_t>(clocks, 1); ++c) {
            thread == 0 ? clock(mine) : clock_of_other(mine);
          }
          if (clocks == 0) mine.finish();
        });
      };
      run(0);
      store.table(0);
      const std::string job = fmt::format("{}.2-rows", consistency);
      if (rank == 0) at_first = bytes_of_job(box, job);
      store.table(0);
      run(kClocks);
      const std::vector<std::byte> table = store.table(0);
      if (rank == 0) bytes = bytes_of_job(box, job) - at_first;
      store.table(0);
      std::vector<int64_t> got(kAll);
      std::memcpy(got.data(), table.data(), table.size());
      EXPECT_EQ(got[0], 4 * kClocks);
      for (uint64_t row = 1; row < kAll; ++row) {
        const bool shared = row % 1000 == 0, own = row % 100 == 0 || row % 100 == 3;
        const bool updated = shared || (own && row % 1000 != 3);
        EXPECT_EQ(got[row], shared ? 2 * kClocks : updated ? kClocks : 0) << row;
      }
    });
    // A row goes with its index, 12 bytes. What the ranks updated comes back in some 30 chunks of
    // 64 words. (Whole it is 640,000 bytes of a rank and clock.)
    EXPECT_GE(bytes, kClocks * 2 * kOfRank * 12) << consistency;
    EXPECT_LE(bytes, (kClocks + 3) * 2 * (kOfRank * 12 + 40 * 256)) << consistency;
    fmt::print("{}: {} bytes of a rank and clock\n", consistency, bytes / kClocks / 2);
  }
}

// The bytes that each box got, initial state and ten clocks, of two ranks that share no row, at
// these machines, of which the first has 28 of 64 chunks, and the second the others.
std::vector<uint64_t> bytes_of_boxes(Box& box, const std::string& name,
                                     std::array<uint64_t, 2> hosts) {
  constexpr uint64_t kOfFirst = 28 * 64;
  std::vector<uint64_t> bytes(2);
  std::atomic<uint64_t> sum = 0;
  each_rank(2, [&](uint32_t rank) {
    StoreOptions options;
    options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true}};
    options.host = hosts[rank];
    options.worker = worker_options(box, name, rank, 2);
    options.worker.transport = "tcp";
    Store store(options);
    StoreThread mine(store, 0);
    const uint64_t first = rank == 0 ? 0 : kOfFirst, end = rank == 0 ? kOfFirst : kRows;
    const auto clock = [&] {
      for (uint64_t row = first; row < end; ++row) mine.update(0, row, int32_t{1});
      mine.clock();
    };
    mine.begin_virtual();
    clock();
    mine.finish();
    for (int i = 0; i < 10; ++i) clock();
    for (uint64_t row = first; row < end; ++row) sum += mine.read<int32_t>(0, row);
    if (rank == 0) {
      const uint64_t enough = 11 * kRows * sizeof(int32_t);
      while (bytes[0] + bytes[1] < enough) {  // until the cores have said so
        std::ranges::fill(bytes, 0);
        for (const JobStatus& job : box.status().jobs) {
          if (job.name != name + ".2-rows") continue;
          for (const JobCoreStatus& core : job.cores) {
            for (const QueueStatus& queue : core.queues) bytes[core.box] += queue.flow.bytes_in;
          }
        }
      }
    }
    mine.clock();  // nobody leaves before
  });
  EXPECT_EQ(sum, 10 * kRows);
  EXPECT_TRUE(box.becomes_empty()) << "the next job finds no load";
  return bytes;
}

// With a box at each of two machines no row of one leaves it; with a box at none, or all rows of
// one, boxes have about as much.
TEST(Store, RowsLieAtTheMachineThatUsesThem) {
  const char* shards = std::getenv("PHUB_TEST_SHARDS");
  const std::string before = shards ? shards : "0";
  setenv("PHUB_TEST_SHARDS", "1", 1);
  Box box("pack:1 core:1 pu:1");  // machine 1; the other box is at 2
  setenv("PHUB_TEST_SHARDS", before.c_str(), 1);
  constexpr uint64_t kOfChunk = 11 * 256;  // at first, and in ten clocks
  constexpr uint64_t kClocks = 4096;       // at most, of the keys that go with each clock
  const auto expect_near = [&](uint64_t bytes, uint64_t chunks) {
    EXPECT_GE(bytes, chunks * kOfChunk);
    EXPECT_LE(bytes, chunks * kOfChunk + kClocks);
  };
  const std::vector<uint64_t> apart = bytes_of_boxes(box, "apart", {1, 2});
  expect_near(apart[0], 28);
  expect_near(apart[1], 36);
  const std::vector<uint64_t> crossed = bytes_of_boxes(box, "crossed", {2, 1});
  expect_near(crossed[0], 36);
  expect_near(crossed[1], 28);
  expect_near(bytes_of_boxes(box, "elsewhere", {8, 9})[0], 32);
  const std::vector<uint64_t> together = bytes_of_boxes(box, "together", {2, 2});
  EXPECT_GE(together[1], 39 * kOfChunk);
  EXPECT_LE(together[1], 41 * kOfChunk + kClocks);
  const std::vector<std::string> notes = box.notes();
  for (const std::string words : {"job 'apart.2-rows' on 2 boxes: gradients of a round: 16.",
                                  "job 'together.2-rows' on 2 boxes"}) {
    EXPECT_TRUE(std::ranges::any_of(
        notes, [&](const std::string& note) { return note.find(words) != note.npos; }))
        << words << "\n"
        << fmt::format("{}", fmt::join(notes, "\n"));
  }
}

// Also of ranks that share no row, none is more than a clock ahead.
TEST(Store, RanksStayTogether) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true}};
  std::array<std::atomic<uint64_t>, 2> clocks = {};
  each_store(box, "together", 2, options, [&](Store&, StoreThread& mine, uint32_t rank) {
    mine.begin_virtual();
    iterate(mine, rank);
    mine.finish();
    for (uint64_t clock = 1; clock <= 20; ++clock) {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ++clocks[rank];
      iterate(mine, rank);
      EXPECT_GE(clocks[1 - rank] + 1, clock);
    }
  });
}

TEST(Store, SettingsHaveTheirEffect) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32"}};
  const auto stats_with = [&](const std::string& name, uint64_t more) {
    StoreStats stats;
    each_store(box, name, 1, options, [&](Store& store, StoreThread& mine, uint32_t) {
      mine.begin_virtual();
      iterate(mine, 0);
      mine.finish();
      for (int clock = 0; clock < 3; ++clock) iterate(mine, 0);
      for (uint64_t row = 0; row < more; ++row) mine.update(0, row, int32_t{1});
      mine.clock();
      stats = store.stats();
    });
    return stats;
  };
  const StoreStats all = stats_with("all", 0);
  EXPECT_EQ(all.in_sequence, 3 * kRows);
  EXPECT_EQ(all.by_index + all.dynamic + all.cached, 0U);
  EXPECT_EQ(all.places, kRows / 2);
  EXPECT_EQ(all.clocks, 4U);
  const StoreStats others = stats_with("others", 10);  // from 0 to 9: every second is known
  EXPECT_EQ(others.dynamic, 5U);
  EXPECT_EQ(others.in_sequence + others.by_index, 3 * kRows + 5);
  options.static_index = false;
  const StoreStats dynamic = stats_with("dynamic", 0);
  EXPECT_EQ(dynamic.dynamic, 3 * kRows);
  EXPECT_EQ(dynamic.places, 0U);
}

TEST(Store, SeveralRowsAtOnce) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = 9, .columns = 3, .type = "f64", .operation = "max"}};
  each_store(box, "batch", 2, options, [](Store&, StoreThread& mine, uint32_t rank) {
    const std::vector<uint64_t> rows = {4, 8, 4};
    const std::vector<double> by = {1, 2, 3, 4, 5, 6, 9, -9, 0.5 + rank};
    mine.update_batch(0, rows, std::span<const double>(by));
    mine.clock();
    std::vector<double> got(9);
    mine.read_batch(0, rows, std::span<double>(got));
    EXPECT_EQ(got, (std::vector<double>{9, 2, 3, 4, 5, 6, 9, 2, 3}));
    mine.read_batch(0, std::vector<uint64_t>{0}, std::span<double>(got).first(3));
    EXPECT_EQ(got[0], -std::numeric_limits<double>::infinity());
  });
}

// Each rank counts its clocks in a row of its own, and all count in one; every third clock, in
// another table. One rank is slow. In the middle the accesses become known, and the state of all is
// looked at.
void counts_out_of_lock_step(const std::string& name, const std::string& consistency, int slack) {
  constexpr uint32_t kRanks = 3;
  constexpr int64_t kClocks = 30;
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRanks + 1, .type = "i64", .fixed = true},
                    {.name = "seldom", .rows = kRanks, .type = "i64"}};
  options.worker.spec.consistency = consistency;
  options.worker.spec.slack = static_cast<uint32_t>(std::max(slack, 0));
  std::array<std::atomic<int64_t>, kRanks> begun = {};
  each_store(box, name, kRanks, options, [&](Store& store, StoreThread& mine, uint32_t rank) {
    for (int64_t clock = 0; clock < kClocks; ++clock) {
      if (clock == 10) mine.begin_gathering();
      begun[rank] = clock + 1;
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(mine.read<int64_t>(0, rank), clock);
      EXPECT_EQ(mine.read<int64_t>(1, rank), (clock + 2) / 3);
      for (uint32_t other = 0; other < kRanks && slack >= 0; ++other) {
        const int64_t count = mine.read<int64_t>(0, other);
        EXPECT_GE(count, clock - slack);
        EXPECT_LE(count, begun[other]);
        EXPECT_EQ(mine.read<int64_t>(0, other), count) << "it changes between clocks";
        EXPECT_GE(mine.read<int64_t>(1, other), (clock - slack + 2) / 3);
      }
      mine.update(0, rank, int64_t{1});
      mine.update(0, kRanks, int64_t{1} << rank);
      EXPECT_EQ(mine.read<int64_t>(0, rank), clock + 1);
      if (clock % 3 == 0) mine.update(1, rank, int64_t{1});
      mine.clock();
      if (clock == 10) mine.finish();
      if (clock != 20) continue;
      const std::vector<std::byte> table = store.table(0);
      std::vector<int64_t> counts(kRanks + 1);
      std::memcpy(counts.data(), table.data(), table.size());
      EXPECT_EQ(counts, (std::vector<int64_t>{21, 21, 21, 7 * 21}));
      for (uint32_t row = 0; row <= kRanks; ++row) {
        EXPECT_EQ(mine.read<int64_t>(0, row), counts[row]);
      }
    }
    const std::vector<std::byte> table = store.table(0);
    std::vector<int64_t> counts(kRanks + 1);
    std::memcpy(counts.data(), table.data(), table.size());
    EXPECT_EQ(counts, (std::vector<int64_t>{kClocks, kClocks, kClocks, 7 * kClocks}));
  });
}

TEST(Store, StaleReadsHaveABound) {
  for (const int slack : {0, 1, 2, 3}) {
    counts_out_of_lock_step(fmt::format("ssp{}", slack), "ssp", slack);
  }
}
TEST(Store, NothingIsLostOutOfLockStep) { counts_out_of_lock_step("async", "async", -1); }

// Over a link on which a clock's exchange takes half a second.
TEST(Store, ReadsWithASlackDoNotWaitForTheLatestClock) {
  using Clock = std::chrono::steady_clock;
  constexpr uint64_t kValues = 50'000;  // 400 kB
  Box box(2);
  const auto seconds_of_reads = [&](const std::string& name, const std::string& consistency) {
    double seconds = 0;
    StoreOptions options;
    options.tables = {{.name = "t", .rows = 1, .columns = kValues, .type = "i64"}};
    options.worker.spec = {.consistency = consistency, .slack = consistency == "ssp" ? 1U : 0U};
    options.worker.transport = "tcp";
    options.worker.nic_budget = "800000";
    each_store(box, name, 2, options, [&](Store&, StoreThread& mine, uint32_t rank) {
      std::vector<int64_t> values(kValues);
      for (int64_t clock = 0; clock < 3; ++clock) {
        const auto begin = Clock::now();
        mine.read(0, 0, std::span(values));
        const std::chrono::duration<double> taken = Clock::now() - begin;
        if (rank == 0 && clock > 0) seconds += taken.count();
        EXPECT_GE(values[kValues - 1], consistency == "ssp" ? clock + clock - 1 : 2 * clock);
        EXPECT_LE(values[kValues - 1], 2 * clock + 1);
        mine.update(0, 0, std::span<const int64_t>(std::vector<int64_t>(kValues, 1)));
        mine.clock();
      }
    });
    return seconds;
  };
  const double waits = seconds_of_reads("waits", "bsp");
  EXPECT_LT(2 * seconds_of_reads("goes-on", "ssp"), waits);
}

TEST(Store, WrongCallsAreRefused) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = 5, .columns = 2},
                    {.name = "one", .rows = 5, .type = "i64"}};
  options.worker = worker_options(box, "wrong", 0, 1);
  Store store(options);
  const auto refuses = [](const std::string& words, const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalid, words, call);
  };
  {
    StoreThread mine(store, 0);
    std::vector<float> two(2), three(3);
    refuses("no table 2", [&] { mine.read(2, 0, std::span<float>(two)); });
    refuses("no row 5", [&] { mine.read(0, 5, std::span<float>(two)); });
    refuses("12 bytes", [&] { mine.read(0, 0, std::span<float>(three)); });
    refuses("values of type f32", [&] { mine.read<int64_t>(0, 0); });
    refuses("values of type i64", [&] { mine.update(1, 0, 1.0); });
    refuses("no iteration is being recorded", [&] { mine.finish(); });
    mine.begin_virtual();
    refuses("is being recorded already", [&] { mine.begin_gathering(); });
    refuses("no row 7", [&] { mine.read<int64_t>(1, 7); });
    mine.finish();
    refuses("thread 0 of the store has a StoreThread", [&] { StoreThread(store, 0); });
    refuses("thread 1 of a store of 1 threads", [&] { StoreThread(store, 1); });
    mine.update(1, 3, int64_t{4});
    refuses("table(): there are updates that were not clocked", [&] { store.table(1); });
    mine.clock();
    EXPECT_EQ(mine.read<int64_t>(1, 3), 4);
  }
  refuses("no table 2", [&] { store.table(2); });
  {
    StoreThread mine(store, 0);
    mine.begin_gathering();
    mine.update(1, 3, int64_t{4});
    refuses("finish(): there are updates that were not clocked", [&] { mine.finish(); });
    refuses("finish(): there are updates that were not clocked", [&] { mine.clock(); });
  }
  const auto refuses_options = [&](const std::string& words, auto change) {
    StoreOptions wrong = options;
    change(wrong);
    refuses(words, [&] { Store refused(wrong); });
  };
  refuses_options("its rank is -1", [](StoreOptions& o) { o.worker.rank = -1; });
  refuses_options("its rank is 1", [](StoreOptions& o) { o.worker.rank = 1; });
  refuses_options("leave out min_ranks", [](StoreOptions& o) {
    o.worker.spec.world_size = 2;
    o.worker.spec.min_ranks = 1;
  });
  refuses_options("must be empty", [](StoreOptions& o) { o.worker.spec.keys = {{.name = "k"}}; });
  refuses_options("saver",
                  [](StoreOptions& o) { o.worker.saver = [](uint64_t) { return RankState(); }; });
  refuses_options("threads, not 0", [](StoreOptions& o) { o.threads = 0; });
  refuses_options("batches, not 65", [](StoreOptions& o) { o.batches = 65; });
  refuses_options("gather_again is 1.5", [](StoreOptions& o) { o.gather_again = 1.5; });
  refuses_options("gather_again is for lock-step", [](StoreOptions& o) {
    o.gather_again = 0.5;
    o.worker.spec.consistency = "async";
  });
  refuses_options("needs the static_index", [](StoreOptions& o) {
    o.gather_again = 0.5;
    o.static_index = false;
  });
  refuses_options("a store has 1 to", [](StoreOptions& o) { o.tables.clear(); });
}

// A rank that never comes is the error of all threads, named.
TEST(Store, ARankThatIsMissingIsNamed) {
  Box box(2);
  StoreOptions options;
  options.worker = worker_options(box, "alone", 0, 2);
  options.worker.spec.join_limit_ms = 300;
  options.tables = {{.name = "t", .rows = 5}};
  options.threads = 2;
  Store store(options);
  each_thread(2, [&store](uint32_t t) {
    StoreThread mine(store, t);
    for (int again = 0; again < 2; ++again) {
      expect_error(ErrorCode::kRankLost, "rank 1", [&] { mine.read<float>(0, 0); });
    }
    expect_error(ErrorCode::kRankLost, "rank 1", [&] { mine.clock(); });
  });
  expect_error(ErrorCode::kRankLost, "rank 1", [&] { store.table(0); });
}

// A rank that comes back to a store in the middle of its life.
TEST(Store, BeginsAnew) {
  Box box(2);
  const auto options_of = [&box](uint32_t rank) {
    StoreOptions options;
    options.worker = worker_options(box, "again", rank, 2);
    options.tables = {{.name = "t", .rows = 5}};
    return options;
  };
  Store stays(options_of(0));
  std::optional<Store> leaves(std::in_place, options_of(1));
  each_thread(2, [&](uint32_t rank) { StoreThread(rank == 0 ? stays : *leaves, 0).clock(); });
  leaves.reset();
  Store comes(options_of(1));
  StoreThread mine(comes, 0);
  expect_error(ErrorCode::kTaken, "is in round", [&mine] { mine.read<float>(0, 0); });
}

}  // namespace store_test
}  // namespace phub::iterstore
