// Tables in pieces, which are dealt out to the partitions of a cache: what is copied, and in which
// order. That no row is lost or counted twice, random programs say (cache_rig.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/geeps/held_exchange.h"
#include "tests/geeps/plain_job.h"
#include "tests/seeds.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps {
namespace partitions_test {

using ::testing::Each;
using testing::HeldExchange;
using testing::plain_job;

// The update is outside of the sequence, and all its rows are pinned: no partition has any. The
// partition without rows of its table is busy, and that must not matter.
TEST(Partitions, AnUpdateOfPinnedRowsComesBeforeItsClock) {
  const std::vector<TableSpec> specs = {
      {.name = "in 0 and 1", .row_floats = 4, .keys = dense(2), .piece_bytes = 16},
      {.name = "in 1 and 2", .row_floats = 4, .keys = dense(2), .piece_bytes = 16},
      {.name = "in 2", .row_floats = 4, .keys = dense(1), .local = true},
      {.name = "in 0", .row_floats = 4, .keys = dense(1), .local = true},
      {.name = "in 1", .row_floats = 4, .keys = dense(1), .local = true},
      {.name = "in 2, too", .row_floats = 4, .keys = dense(1), .local = true},
      {.name = "in 0, too", .row_floats = 4, .keys = dense(1), .local = true}};
  const auto device =
      make_host_device({.budget_bytes = 1 << 20, .copy_latency = std::chrono::milliseconds(5)});
  StandaloneExchange exchange(plain_job(specs));
  Cache cache(*device, exchange, specs, {.partitions = 3, .timeout = std::chrono::seconds(10)});
  const auto update = [&](uint32_t table, const std::vector<uint64_t>& keys, bool is_busy) {
    UpdateBuffer buffer(cache, table, keys);
    if (buffer.data() != nullptr) std::fill_n(buffer.data(), buffer.buffer().floats(), 1.0f);
    if (is_busy) {  // for two copies, which is longer than the clock's
      const LocalBuffer one(cache, 2 + table, dense(1), Fetch::kNo);
      const LocalBuffer two(cache, 5 + table, dense(1), Fetch::kNo);
    }
    buffer.update();
    cache.table_clock(table);
  };
  cache.begin_virtual();
  for (uint32_t table = 0; table < 2; ++table) {
    { const ReadBuffer read(cache, table, dense(2)); }
    update(table, dense(2), false);
  }
  cache.finish_sequence();
  for (uint32_t table = 0; table < 2; ++table) {
    update(table, dense(1), true);
    cache.wait_all();
    EXPECT_THAT(exchange.parameters(2 * table), Each(-1)) << specs[table].name;
    EXPECT_THAT(exchange.parameters(2 * table + 1), Each(0)) << specs[table].name;
  }
}

// Of a table whose rows are used in no order, so that those of all pieces lie among each other in a
// buffer: what is copied to the host are these rows, however many pieces and partitions there are.
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
      {.name = "w", .row_floats = kFloats, .keys = dense(kRows), .piece_bytes = 35 * kRowBytes},
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
    std::vector<float> parameters;
    for (size_t key = 0; key < exchange_->keys(); ++key) {
      std::ranges::copy(exchange_->parameters(key), std::back_inserter(parameters));
    }
    EXPECT_EQ(parameters, want);
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

// A compute stream that stands still until it is let go.
class Gate {
 public:
  explicit Gate(Stream& stream) {
    stream.call([opened = opened_.get_future().share()] { opened.wait(); });
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

// Two tables of parameters, of a piece for each row, on a device that holds everything or nothing
// of them.
class PiecesInOrder : public ::testing::TestWithParam<uint64_t> {
 protected:
  static constexpr uint32_t kRows = 12, kFloats = 64;
  static constexpr uint64_t kTop = 1, kTopKey = 1;  // the key of its first row; the bottom's is 0

  void update(uint32_t table) {
    UpdateBuffer buffer(cache_, table, specs_[table].keys);
    if (buffer.data() != nullptr) compute_->fill(buffer.data(), 1, buffer.buffer().floats());
    buffer.update();
    cache_.table_clock(table);
  }
  void read(uint32_t table) { const ReadBuffer buffer(cache_, table, specs_[table].keys); }
  // A net's: the table that is read first is updated last.
  void record() {
    cache_.begin_virtual();
    read(0);
    read(kTop);
    update(kTop);
    update(0);
    cache_.finish_sequence();
    EXPECT_EQ(cache_.placement().entries[kTop].pinned, GetParam() == 1 << 20);
  }
  void answer_all() {
    for (size_t key = 0; key < exchange_.keys(); ++key) exchange_.answer(key);
    cache_.wait_all();
  }

  const std::vector<TableSpec> specs_ = {
      {.name = "bottom", .row_floats = kFloats, .keys = dense(1)},
      {.name = "top", .row_floats = kFloats, .keys = dense(kRows), .piece_bytes = kFloats * 4}};
  // A copy takes longer than all that is computed.
  const std::unique_ptr<Device> device_ =
      make_host_device({.budget_bytes = 1 << 20, .copy_latency = std::chrono::milliseconds(10)});
  const std::unique_ptr<Stream> compute_ = device_->make_stream("compute");
  HeldExchange exchange_{specs_};
  Cache cache_{
      *device_, exchange_, specs_, {.budget_bytes = GetParam(), .compute = compute_.get()}};
};

// Both are computed at nearly the same moment, that of the top first.
TEST_P(PiecesInOrder, WhatIsReadFirstIsPushedAmidAnotherTable) {
  record();
  read(0);
  read(kTop);
  Gate gate(*compute_);
  update(kTop);
  update(0);
  gate.open();
  exchange_.wait_for_push(exchange_.keys());
  const std::vector<size_t> pushed = exchange_.pushed();
  const auto bottom = std::ranges::find(pushed, 0U) - pushed.begin();
  EXPECT_LE(bottom, 4) << "so many were enqueued, of " << kRows;
  answer_all();
}

TEST_P(PiecesInOrder, APieceWaitsForItsOwnResultAlone) {
  record();
  for (int iteration = 0; iteration < 3; ++iteration) {
    SCOPED_TRACE(iteration);
    read(0);
    read(kTop);
    update(kTop);
    exchange_.wait_for_push(static_cast<size_t>(iteration) * exchange_.keys() + kRows);
    update(0);
    exchange_.wait_for_push((static_cast<size_t>(iteration) + 1) * exchange_.keys());
    compute_->synchronize();
    const uint64_t before = device_->stats().bytes_to_device;
    const auto copied = [&](size_t pieces) {
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      const auto arrived = [&] { return device_->stats().bytes_to_device - before; };
      while (arrived() < pieces * kFloats * 4 && std::chrono::steady_clock::now() < give_up) {
        std::this_thread::yield();
      }
      return arrived() == pieces * kFloats * 4;
    };
    exchange_.answer(0);
    ASSERT_TRUE(copied(1)) << "of the bottom";
    for (size_t piece = kRows; piece-- > 0;) {
      exchange_.answer(kTopKey + piece);
      ASSERT_TRUE(copied(1 + kRows - piece)) << "piece " << piece << " of the top";
    }
    cache_.wait_all();
  }
}

// Its pieces wait for results that do not come, and another buffer lies in the same memory.
TEST(Pieces, AReadThatIsLeftOutFreesItsMemory) {
  const std::vector<TableSpec> specs = {
      {.name = "w", .row_floats = 64, .keys = dense(8), .piece_bytes = 256},
      {.name = "x", .row_floats = 64, .keys = dense(8), .local = true}};
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  const auto iterate = [&](Cache& cache, bool reads) {
    if (reads) const ReadBuffer read(cache, 0, specs[0].keys);
    { const LocalBuffer local(cache, 1, specs[1].keys); }
    UpdateBuffer update(cache, 0, specs[0].keys);
    if (update.data() != nullptr) std::fill_n(update.data(), update.buffer().floats(), 1.0F);
    update.update();  // in the memory of the read
    cache.table_clock(0);
  };
  for (uint64_t budget = 256;; budget += 256) {  // the least
    ASSERT_LT(budget, 1 << 16);
    HeldExchange exchange(specs);
    Cache cache(
        *device, exchange, specs,
        {.budget_bytes = budget, .reserved_bytes = 2048, .timeout = std::chrono::seconds(20)});
    cache.begin_virtual();
    iterate(cache, true);
    try {
      cache.finish_sequence();
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kFull) << error.what();
      continue;
    }
    ASSERT_EQ(cache.placement().accesses[0].offset, cache.placement().accesses[2].offset);
    iterate(cache, true);
    exchange.wait_for_push(exchange.keys());
    iterate(cache, false);  // two calls show that the read before them is left out
    for (size_t key = 0; key < exchange.keys(); ++key) exchange.answer(key);
    exchange.wait_for_push(2 * exchange.keys());
    break;
  }
}

INSTANTIATE_TEST_SUITE_P(Budgets, PiecesInOrder, ::testing::Values(1 << 20, 7 << 10),
                         [](const auto& info) {
                           return info.param == 1 << 20 ? std::string("pinned")
                                                        : std::string("moved");
                         });

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

TEST(Pieces, HaveEveryRowOnce) {
  for (uint32_t rows = 1; rows < 40; ++rows) {
    for (uint32_t in_piece = 1; in_piece <= rows; ++in_piece) {
      const RowSplit split{.rows = rows, .rows_per_piece = in_piece};
      uint32_t next = 0;
      for (uint32_t piece = 0; piece < split.pieces(); ++piece) {
        const auto [begin, end] = split.range_of(piece);
        ASSERT_EQ(begin, next);
        ASSERT_LT(begin, end);
        ASSERT_LE(end - begin, in_piece);
        for (uint32_t row = begin; row < end; ++row) ASSERT_EQ(split.piece_of(row), piece);
        next = end;
      }
      ASSERT_EQ(next, rows);
    }
  }
}

}  // namespace partitions_test
}  // namespace phub::geeps
