// Tables that are divided among the partitions of a cache: no row is lost or counted twice, and the
// bits are those of a cache with one partition.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/geeps/plain_job.h"
#include "tests/seeds.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps {
namespace partitions_test {

using testing::plain_job;

constexpr uint64_t kReserved = 16 << 10;
constexpr uint32_t kSamples = 3, kFactors = 5, kLocal = 6;  // the latter two: tables
constexpr uint32_t kIterations = 8;

std::vector<TableSpec> tables() {
  return {{.name = "long rows", .row_floats = 300, .keys = dense(10)},
          {.name = "few", .row_floats = 5, .keys = dense(2)},
          {.name = "one", .row_floats = 7, .keys = dense(1)},
          {.name = "twice", .row_floats = 2, .keys = dense(11), .max_staleness = 2},
          {.name = "own", .row_floats = 4, .keys = dense(13), .read_my_writes = true},
          {.name = "factors", .row_floats = 4, .keys = dense(7), .samples = kSamples},
          {.name = "local", .row_floats = 3, .keys = dense(9), .local = true}};
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(
      a, b, {}, [](float f) { return std::bit_cast<uint32_t>(f); },
      [](float f) { return std::bit_cast<uint32_t>(f); });
}

// A table, as it should be.
struct Flat {
  std::vector<float> rows, log;
  std::vector<bool> used;  // by row: updated in this clock
};

// A cache and what it should hold. In a sequence all rows of a table are used together, and as few
// as possible are pinned.
class Job {
 public:
  Job(uint64_t seed, uint32_t partitions, bool sequence)
      : sequence_(sequence), random_(seed), specs_(tables()) {
    for (const TableSpec& spec : specs_) {
      const size_t rows = spec.keys.size(), floats = rows * spec.row_floats;
      flat_.push_back({.rows = std::vector<float>(floats),
                       .log = std::vector<float>(floats),
                       .used = std::vector<bool>(rows)});
    }
    uint64_t budget = kReserved + 256;
    while (!start({.budget_bytes = budget,
                   .reserved_bytes = kReserved,
                   .poison = true,
                   .partitions = partitions})) {
      budget += 256;
    }
  }

  // Returns all that was read.
  std::vector<float> run() {
    for (uint32_t i = 0; i < kIterations && !::testing::Test::HasFailure(); ++i) {
      iterate(sequence_ && i % 2 == 0);
      cache_->wait_all();
      check_exchange();
    }
    return std::move(seen_);
  }
  uint64_t bytes_to_host() const { return cache_->stats().bytes_to_host; }

 private:
  bool start(const CacheOptions& options) {
    cache_.reset();
    exchange_.emplace(plain_job(specs_));
    cache_.emplace(*device_, *exchange_, specs_, options);
    if (!sequence_) return true;
    cache_->begin_virtual();
    virtually_ = true;
    iterate(true);
    virtually_ = false;
    try {
      cache_->finish_sequence();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kFull) << e.what();
      return false;
    }
    return true;
  }

  void iterate(bool whole) {
    for (uint32_t table = 0; table < specs_.size(); ++table) {
      if (table == kLocal) {
        local(keys_of_call(table, whole));
        continue;
      }
      read(table, keys_of_call(table, whole));
      if (table == kFactors) {
        clock_factors();
        continue;
      }
      const size_t updates = whole ? 1 : random_() % 4;
      for (size_t i = 0; i < updates; ++i) {
        update(table, keys_of_call(table, whole));
        if (specs_[table].read_my_writes) read(table, keys_of_call(table, whole));
      }
      clock(table);
    }
  }

  std::vector<uint64_t> keys_of_call(uint32_t table, bool whole) {
    std::vector<uint64_t> keys = specs_[table].keys;
    if (whole) return keys;
    std::ranges::shuffle(keys, random_);
    keys.resize(1 + random_() % keys.size());
    return keys;
  }

  float value() {
    constexpr float kValues[] = {-0.0f, 1, 2, -3, 0.5f};
    return kValues[random_() % std::size(kValues)];
  }

  void look_at(uint32_t table, const Buffer& buffer, std::span<const uint64_t> keys) {
    const size_t width = specs_[table].row_floats;
    std::vector<float> got(buffer.floats());
    device_->read(got.data(), buffer.data, got.size() * sizeof(float));
    seen_.insert(seen_.end(), got.begin(), got.end());
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t at = keys[i / width] * width + i % width;
      const float own = specs_[table].read_my_writes ? flat_[table].log[at] : 0.0f;
      ASSERT_EQ(got[i], flat_[table].rows[at] - own)
          << specs_[table].name << ", row " << keys[i / width] << ", float " << i % width;
    }
  }

  void read(uint32_t table, const std::vector<uint64_t>& keys) {
    const ReadBuffer buffer(*cache_, table, keys);
    if (!virtually_) look_at(table, buffer.buffer(), keys);
  }

  void local(const std::vector<uint64_t>& keys) {
    const LocalBuffer buffer(*cache_, kLocal, keys);
    if (virtually_) return;
    look_at(kLocal, buffer.buffer(), keys);
    put(kLocal, buffer.data(), keys, [&](size_t at, float v) { flat_[kLocal].rows[at] = v; });
  }

  // The first update of a clock is copied. In a sequence, where all rows are used together, the
  // other rows become zero with it.
  void update(uint32_t table, const std::vector<uint64_t>& keys) {
    Flat& flat = flat_[table];
    UpdateBuffer buffer(*cache_, table, keys);
    if (!virtually_) {
      const size_t width = specs_[table].row_floats;
      const bool first = std::ranges::none_of(flat.used, std::identity{});
      if (sequence_ && first && keys.size() < flat.used.size()) {
        std::vector<bool> others(flat.used.size(), true);
        for (const uint64_t key : keys) others[key] = false;
        flat.used = others;
      }
      put(table, buffer.data(), keys,
          [&](size_t at, float v) { flat.log[at] = flat.used[at / width] ? flat.log[at] + v : v; });
      for (const uint64_t key : keys) flat.used[key] = true;
    }
    buffer.update();
  }

  template <class Take>
  void put(uint32_t table, float* data, const std::vector<uint64_t>& keys, Take take) {
    const size_t width = specs_[table].row_floats;
    std::vector<float> values(keys.size() * width);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = value();
      take(keys[i / width] * width + i % width, values[i]);
    }
    device_->write(data, values.data(), values.size() * sizeof(float));
  }

  void clock(uint32_t table) {
    cache_->table_clock(table);
    if (virtually_) return;
    Flat& flat = flat_[table];
    for (size_t i = 0; i < flat.rows.size(); ++i) flat.rows[i] -= flat.log[i];
    pushed_.push_back({table, flat.log, flat.used});
    std::ranges::fill(flat.log, 0.0f);
    flat.used.assign(flat.used.size(), false);
  }

  void clock_factors() {
    const size_t rows = specs_[kFactors].keys.size(), columns = specs_[kFactors].row_floats;
    const size_t pairs = virtually_ ? kSamples : random_() % (kSamples + 1);
    std::vector<float> values(kSamples * (rows + columns));
    for (float& v : values) v = value();
    device_->write(factors_.data(), values.data(), factors_.bytes());
    const float* const right = factors_.floats() + kSamples * rows;
    const FactorPairs all{factors_.floats(), right, static_cast<uint32_t>(pairs)};
    cache_->table_clock(kFactors, {&all, 1});
    if (virtually_) return;
    for (size_t p = 0; p < pairs; ++p) {
      for (size_t i = 0; i < rows * columns; ++i) {
        flat_[kFactors].rows[i] -=
            values[p * rows + i / columns] * values[kSamples * rows + p * columns + i % columns];
      }
    }
  }

  // What was pushed for the latest clock, and what it led to.
  void check_exchange() {
    for (const Pushed& pushed : pushed_) {
      if (std::ranges::none_of(pushed.used, std::identity{})) continue;  // a null
      EXPECT_TRUE(same_bits(exchange_->gradient(pushed.table), pushed.log))
          << "the log of " << specs_[pushed.table].name;
    }
    pushed_.clear();
    for (uint32_t table = 0; table < kLocal; ++table) {
      EXPECT_TRUE(std::ranges::equal(exchange_->parameters(table), flat_[table].rows))
          << "the parameters of " << specs_[table].name;
    }
  }

  struct Pushed {
    uint32_t table;
    std::vector<float> log;
    std::vector<bool> used;
  };

  const bool sequence_;
  bool virtually_ = false;
  std::mt19937_64 random_;
  const std::vector<TableSpec> specs_;
  const std::unique_ptr<Device> device_ =
      make_host_device({.budget_bytes = 1 << 20, .poison_copies = true});
  const DeviceMemory factors_{*device_, size_t{kSamples} * (7 + 4) * sizeof(float), "factors"};
  std::optional<StandaloneExchange> exchange_;
  std::optional<Cache> cache_;
  std::vector<Flat> flat_;
  std::vector<Pushed> pushed_;
  std::vector<float> seen_;
};

void compare(bool sequence) {
  const phub::testing::Seeds seeds = phub::testing::fresh_seeds(phub::testing::scaled(10));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::vector<float> want;
    for (const uint32_t partitions : {1u, 2u, 3u, 4u, 7u}) {
      SCOPED_TRACE(::testing::Message() << partitions << " partitions, PHUB_SEED=" << seed);
      Job job(seed, partitions, sequence);
      const std::vector<float> seen = job.run();
      if (partitions == 1) want = seen;
      EXPECT_TRUE(same_bits(seen, want));
      EXPECT_GT(job.bytes_to_host(), 0u);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Partitions, RowsOfNoSequenceAreThoseOfOnePartition) { compare(false); }
TEST(Partitions, RowsThatAreUsedTogetherAreThoseOfOnePartition) { compare(true); }

// The update is outside of the sequence, and all its rows are pinned: no partition has any. The
// partition without rows of its table is busy, and that must not matter.
TEST(Partitions, AnUpdateOfPinnedRowsComesBeforeItsClock) {
  const std::vector<TableSpec> specs = {
      {.name = "in 0 and 1", .row_floats = 4, .keys = dense(2)},
      {.name = "in 1 and 2", .row_floats = 4, .keys = dense(2)},
      {.name = "in 2", .row_floats = 4, .keys = dense(1), .local = true},
      {.name = "in 0", .row_floats = 4, .keys = dense(1), .local = true}};
  const auto device =
      make_host_device({.budget_bytes = 1 << 20, .copy_latency = std::chrono::milliseconds(2)});
  StandaloneExchange exchange(plain_job(specs));
  Cache cache(*device, exchange, specs, {.partitions = 3, .timeout = std::chrono::seconds(10)});
  const auto update = [&](uint32_t table, const std::vector<uint64_t>& keys) {
    UpdateBuffer buffer(cache, table, keys);
    if (buffer.data() != nullptr) std::fill_n(buffer.data(), buffer.buffer().floats(), 1.0f);
    buffer.update();
    cache.table_clock(table);
  };
  cache.begin_virtual();
  for (uint32_t table = 0; table < 2; ++table) {
    { const ReadBuffer read(cache, table, dense(2)); }
    update(table, dense(2));
  }
  cache.finish_sequence();
  for (uint32_t table = 0; table < 2; ++table) {
    for (int i = 0; i < 5; ++i) const LocalBuffer busy(cache, 2 + table, dense(1), Fetch::kNo);
    update(table, dense(1));
    cache.wait_all();
    const std::vector<float> want = {-1, -1, -1, -1, 0, 0, 0, 0};
    EXPECT_TRUE(std::ranges::equal(exchange.parameters(table), want)) << specs[table].name;
  }
}

// Of a table whose rows are used in no order, so that those of all partitions lie among each other
// in a buffer: what is copied to the host are these rows, however many partitions there are.
class ScatteredRows : public ::testing::Test {
 protected:
  static constexpr uint32_t kRows = 240, kFloats = 16;
  static constexpr uint64_t kRowBytes = kFloats * sizeof(float);

  ScatteredRows() {
    const phub::testing::Seeds seeds = phub::testing::fresh_seeds(1);
    random_.seed(seeds.first);
    for (std::vector<uint64_t>* keys : {&all_, &some_}) std::ranges::shuffle(*keys, random_);
    some_.resize(kRows / 3);
  }

  void start(CacheOptions options) {
    cache_.reset();
    exchange_.emplace(plain_job(specs_));
    cache_.emplace(*device_, *exchange_, specs_, options);
  }
  void update(const std::vector<uint64_t>& keys) {
    UpdateBuffer buffer(*cache_, 0, keys);
    if (buffer.data() != nullptr) std::fill_n(buffer.data(), buffer.buffer().floats(), 1.0F);
    buffer.update();
  }
  void save(const std::vector<uint64_t>& keys) {
    const LocalBuffer buffer(*cache_, 1, keys, Fetch::kNo);
    if (buffer.data() != nullptr) std::fill_n(buffer.data(), buffer.buffer().floats(), 2.0F);
  }
  // Reads what was saved, so that all saves have completed.
  void await_saves() {
    const LocalBuffer buffer(*cache_, 1, all_, Fetch::kYes, Save::kNo);
    if (buffer.data() != nullptr) EXPECT_EQ(buffer.data()[0], 2);
  }
  uint64_t bytes_to_host() const { return device_->stats().bytes_to_host; }

  std::mt19937_64 random_;
  std::vector<uint64_t> all_ = dense(kRows), some_ = dense(kRows);
  const std::vector<TableSpec> specs_ = {
      {.name = "w", .row_floats = kFloats, .keys = dense(kRows)},
      {.name = "local", .row_floats = kFloats, .keys = dense(kRows), .local = true}};
  const std::unique_ptr<Device> device_ = make_host_device({.budget_bytes = 1 << 20});
  std::optional<StandaloneExchange> exchange_;
  std::optional<Cache> cache_;
};

TEST_F(ScatteredRows, AreCopiedOnceFromBuffers) {
  for (const uint32_t partitions : {1u, 2u, 4u, 7u}) {
    SCOPED_TRACE(partitions);
    start({.partitions = partitions});
    const uint64_t before = bytes_to_host();
    update(all_);
    update(some_);
    cache_->table_clock(0);
    save(all_);
    save(some_);
    cache_->wait_all();
    await_saves();
    EXPECT_EQ(bytes_to_host() - before, 2 * (all_.size() + some_.size()) * kRowBytes);
    std::vector<float> want(size_t{kRows} * kFloats, -1);
    for (const uint64_t key : some_) std::fill_n(want.begin() + key * kFloats, kFloats, -2.0F);
    EXPECT_TRUE(std::ranges::equal(exchange_->parameters(0), want));
  }
}

TEST_F(ScatteredRows, AreCopiedOnceFromPinnedLogs) {
  for (const uint32_t partitions : {1u, 2u, 4u, 7u}) {
    SCOPED_TRACE(partitions);
    start({.partitions = partitions});
    const auto iterate = [&] {
      { const ReadBuffer read(*cache_, 0, all_); }
      update(all_);
      cache_->table_clock(0);
    };
    cache_->begin_virtual();
    iterate();
    cache_->finish_sequence();
    ASSERT_TRUE(cache_->placement().entries[0].pinned);
    const uint64_t before = bytes_to_host();
    iterate();
    cache_->wait_all();
    EXPECT_EQ(bytes_to_host() - before, all_.size() * kRowBytes);
  }
}

// The caller copies what is pinned when there is another sequence.
TEST_F(ScatteredRows, AreCopiedOnceForANewSequence) {
  for (const uint32_t partitions : {1u, 4u}) {
    SCOPED_TRACE(partitions);
    start({.partitions = partitions});
    const auto iterate = [&] {
      save(all_);
      await_saves();
    };
    const auto record = [&] {
      cache_->begin_virtual();
      iterate();
      cache_->finish_sequence();
    };
    record();
    ASSERT_TRUE(cache_->placement().entries[0].pinned);
    iterate();
    const uint64_t before = bytes_to_host();
    record();
    EXPECT_EQ(bytes_to_host() - before, all_.size() * kRowBytes);
    iterate();
  }
}

TEST(Stretches, ThatOverlapBecomeOne) {
  Stretch a{0, 4}, b{4, 2}, c{3, 1}, none{0, 0}, d{9, 3}, e{10, 5}, f{11, 1};
  join_overlapping({&f, &b, &a, &d, &none, &c, &e});
  EXPECT_EQ(a, (Stretch{0, 4}));
  EXPECT_EQ(c, a);
  EXPECT_EQ(b, (Stretch{4, 2}));
  EXPECT_EQ(none, (Stretch{0, 0}));
  for (const Stretch& each : {d, e, f}) EXPECT_EQ(each, (Stretch{9, 6}));
  const std::vector<geeps::Run> runs = {{7, 0, 2}, {3, 9, 1}};
  EXPECT_EQ(stretch_of(runs), (Stretch{3, 6}));
  EXPECT_EQ(stretch_of({}), (Stretch{0, 0}));
}

TEST(Partitions, EveryRowIsInTheRangeOfItsPartition) {
  for (uint32_t rows = 1; rows < 40; ++rows) {
    for (uint32_t partitions = 1; partitions < 9; ++partitions) {
      for (uint32_t first = 0; first < partitions; ++first) {
        const RowSplit split{.rows = rows, .partitions = partitions, .first = first};
        std::vector<uint32_t> in_order;
        for (uint32_t row = 0; row < rows; ++row) {
          const uint32_t partition = split.partition_of(row);
          const auto [begin, end] = split.range_of(partition);
          ASSERT_TRUE(begin <= row && row < end) << row << " of " << rows;
          ASSERT_LE(end - begin, (rows + partitions - 1) / partitions);
          if (row == begin) in_order.push_back(partition);
        }
        ASSERT_EQ(split.used(), in_order);
      }
    }
  }
}

}  // namespace partitions_test
}  // namespace phub::geeps
