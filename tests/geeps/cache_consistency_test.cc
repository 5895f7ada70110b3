// Several workers with caches and a box, in BSP, SSP and async. Worker r adds 64^r in each clock,
// so what is read tells how many clocks of each worker it has: all that a consistency promises.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::geeps {
namespace cache_consistency_test {

using phub::testing::Box;
using phub::testing::each_rank;

constexpr uint32_t kWorkers = 3;
constexpr uint64_t kClocks = 20;  // below 64
constexpr uint32_t kLater = 2;    // clocks by which a table may be staler than the job

using Counts = std::array<uint64_t, kWorkers>;

// Every element of a row is so many times 64^r for each clock of worker r. Exact in f32.
float factor_of(size_t row) { return static_cast<float>(1 + row % 4); }

Counts counts_in(float value, size_t row) {
  auto rest = static_cast<uint64_t>(value / factor_of(row));
  Counts counts;
  for (uint64_t& count : counts) count = rest % 64, rest /= 64;
  EXPECT_EQ(rest, 0u) << value << " in row " << row;
  return counts;
}

struct Mode {
  const char* consistency;
  uint32_t slack;
};

class Trainer {
 public:
  Trainer(const Mode& mode, Worker& worker, Cache& cache, uint64_t seed)
      : mode_(mode),
        worker_(worker),
        cache_(cache),
        random_(seed * kWorkers + worker.rank()),
        seen_(cache.tables().size()) {
    for (size_t table = 0; table < seen_.size(); ++table) {
      seen_[table].resize(cache.tables()[table].keys.size());
    }
  }

  void iteration() {
    for (uint32_t table = 0; table < seen_.size(); ++table) read(table);
    for (uint32_t table = 0; table < seen_.size(); ++table) add(table);
  }
  void run() {
    for (; clock_ < kClocks; ++clock_) {
      for (uint64_t i = random_() % 60; i > 0; --i) std::this_thread::yield();  // some are slower
      iteration();
    }
    cache_.wait_all();
    worker_.barrier();  // everyone's updates are applied
    for (uint32_t table = 0; table < seen_.size(); ++table) {
      read(table);
      cache_.table_clock(table);  // nothing: its result has all
    }
    cache_.wait_all();
    for (uint32_t table = 0; table < seen_.size(); ++table) {
      for (size_t row = 0; row < seen_[table].size(); ++row) {
        const Buffer buffer = cache_.read(table, {&cache_.tables()[table].keys[row], 1});
        Counts all;
        all.fill(kClocks);
        EXPECT_EQ(counts_in(buffer.data[0], row), all) << "row " << row << " of " << table;
        cache_.post_read(buffer.handle);
      }
    }
  }

 private:
  bool is_late(uint32_t table) const { return cache_.tables()[table].max_staleness > 0; }
  bool is_async() const { return mode_.consistency == std::string("async"); }

  void read(uint32_t table) {
    const TableSpec& spec = cache_.tables()[table];
    const uint64_t later = is_late(table) && !is_async() ? kLater : 0;
    const auto staleness = later > 0 ? std::optional<uint32_t>(spec.max_staleness) : std::nullopt;
    const ReadBuffer read(cache_, table, spec.keys, staleness);
    if (read.data() == nullptr) return;
    for (size_t row = 0; row < spec.keys.size(); ++row) {
      const float* const floats = read.data() + row * spec.row_floats;
      for (uint32_t i = 1; i < spec.row_floats; ++i)
        ASSERT_EQ(floats[i], floats[0]) << "a torn row";
      check(table, row, counts_in(floats[0], row), later, read.buffer().age);
    }
  }

  void check(uint32_t table, size_t row, const Counts& counts, uint64_t later,
             std::optional<uint64_t> age) {
    SCOPED_TRACE(
        fmt::format("worker {}, clock {}, row {} of table {}", worker_.rank(), clock_, row, table));
    const uint64_t mine = counts[worker_.rank()];
    EXPECT_LE(mine, clock_);
    EXPECT_GE(mine + later, clock_) << "its own updates are missing";
    Counts& seen = seen_[table][row];
    for (uint32_t other = 0; other < kWorkers; ++other) {
      EXPECT_GE(counts[other], seen[other]) << "older than before, of worker " << other;
      if (is_async()) continue;
      EXPECT_GE(counts[other] + mode_.slack + later, clock_) << "too old, of worker " << other;
      EXPECT_LE(counts[other], clock_ + mode_.slack + 1) << "too far ahead: worker " << other;
    }
    seen = counts;
    EXPECT_EQ(age.has_value(), !is_async());
    if (!age) return;
    EXPECT_LE(*age, *std::ranges::min_element(counts));
    EXPECT_GE(*age + mode_.slack + later, clock_);
  }

  void add(uint32_t table) {
    const TableSpec& spec = cache_.tables()[table];
    UpdateBuffer update(cache_, table, spec.keys);
    float mine = -1;
    for (uint32_t r = 0; r < worker_.rank(); ++r) mine *= 64;
    for (size_t row = 0; row < spec.keys.size() && update.data() != nullptr; ++row) {
      std::fill_n(update.data() + row * spec.row_floats, spec.row_floats, mine * factor_of(row));
    }
    update.update();
    cache_.table_clock(table);
  }

  const Mode mode_;
  Worker& worker_;
  Cache& cache_;
  std::mt19937_64 random_;
  std::vector<std::vector<Counts>> seen_;  // by table and row: the latest that was read
  uint64_t clock_ = 0;
};

std::vector<TableSpec> tables_of(const Mode& mode) {
  return {{.name = "large", .row_floats = 32, .keys = dense(40), .piece_bytes = 12 * 128},
          {.name = "small", .row_floats = 8, .keys = {7, 2, 11}},
          {.name = "late",
           .row_floats = 16,
           .keys = dense(9),
           .max_staleness = mode.consistency == std::string("async") ? 0 : mode.slack + kLater,
           .piece_bytes = 4 * 64}};
}

// Parameters -= updates.
JobSpec job_of(const Mode& mode, const std::string& name) {
  JobSpec job;
  job.name = name;
  job.keys = keys_of(tables_of(mode));
  job.world_size = kWorkers;
  job.chunk_elements = 96;  // whole rows, several chunks in a table
  job.optimizer = "sgd";
  job.hyper = {{"lr", 1}};
  job.consistency = mode.consistency;
  job.slack = mode.slack;
  job.lease_ms = 60'000;  // nobody is to be lost for being slow
  return job;
}

void train(Box& box, const Mode& mode, const std::string& name, const CacheOptions& options,
           bool records, uint64_t seed) {
  SCOPED_TRACE(fmt::format("{}, PHUB_SEED={}", name, seed));
  each_rank(kWorkers, [&](uint32_t rank) {
    WorkerOptions worker_options = box.options(job_of(mode, name));
    worker_options.rank = static_cast<int32_t>(rank);
    Worker worker(worker_options);
    const std::vector<TableSpec> tables = tables_of(mode);
    WorkerExchange exchange(worker, tables);
    const auto device = make_host_device({.budget_bytes = 1 << 20});
    Cache cache(*device, exchange, tables, options);
    Trainer trainer(mode, worker, cache, seed);
    if (records) {
      cache.begin_virtual();
      trainer.iteration();
      cache.finish_sequence();
    }
    trainer.run();
    worker.barrier();
  });
}

TEST(CacheConsistency, EveryReadHasWhatTheJobPromises) {
  const auto seeds = phub::testing::fresh_seeds(1);
  constexpr Mode kModes[] = {{"bsp", 0}, {"ssp", 0}, {"ssp", 1}, {"ssp", 4}, {"async", 0}};
  Box box;
  for (const Mode& mode : kModes) {
    const auto name = [&](const char* what) {
      return fmt::format("{}{}-{}", mode.consistency, mode.slack, what);
    };
    train(box, mode, name("pinned"), {}, true, seeds.first);
    train(box, mode, name("little"), {.budget_bytes = 20'000, .partitions = 3}, true, seeds.first);
    train(box, mode, name("on-demand"), {.budget_bytes = 20'000, .prefetch = false}, true,
          seeds.first);
    train(box, mode, name("no-sequence"), {}, false, seeds.first);
  }
}

}  // namespace cache_consistency_test
}  // namespace phub::geeps
