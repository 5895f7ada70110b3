// What the cache promises call by call: visibility, overlap, bytes, and what it refuses.
#include "worker/geeps/cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "tests/device/strict_pages.h"
#include "tests/geeps/held_exchange.h"
#include "tests/geeps/plain_job.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps {
namespace cache_test {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HeldExchange;
using testing::plain_job;

constexpr size_t kMiB = 1 << 20;

template <class Run>
void expect_error(ErrorCode code, const ::testing::Matcher<std::string>& what, Run run) {
  EXPECT_THAT(phub::testing::error_of(code, run), what);
}

struct Rig {
  explicit Rig(std::vector<TableSpec> specs, CacheOptions options = {},
               HostDeviceOptions device_options = {.budget_bytes = 4 * kMiB})
      : tables(std::move(specs)),
        device(make_host_device(device_options)),
        exchange(plain_job(tables)) {
    cache.emplace(*device, exchange, tables, options);
  }

  template <class Iteration>
  void record(Iteration iteration) {
    cache->begin_virtual();
    iteration(*cache);
    cache->finish_sequence();
  }

  std::vector<TableSpec> tables;
  std::unique_ptr<HostDevice> device;
  StandaloneExchange exchange;
  std::optional<Cache> cache;
};

void add(Cache& cache, uint32_t table, std::span<const uint64_t> keys, float value) {
  UpdateBuffer update(cache, table, keys);
  if (update.data() != nullptr) std::fill_n(update.data(), update.buffer().floats(), -value);
  update.update();
}

float first_of(Cache& cache, uint32_t table, std::span<const uint64_t> keys,
               std::optional<uint32_t> staleness = {}) {
  const ReadBuffer read(cache, table, keys, staleness);
  return read.data() == nullptr ? 0 : read.data()[0];
}

TEST(Cache, AnUpdateIsSeenAfterItsClock) {
  Rig rig({{"w", 3, dense(4)}});
  const auto keys = dense(4);
  add(*rig.cache, 0, keys, 2);
  EXPECT_EQ(first_of(*rig.cache, 0, keys), 0);  // not clocked
  rig.cache->table_clock(0);
  const ReadBuffer read(*rig.cache, 0, keys);
  EXPECT_EQ(read.data()[11], 2);
  EXPECT_EQ(read.buffer().age, 1);
}

TEST(Cache, SeveralMiniBatchesInAClockAreAddedUp) {
  for (const uint64_t budget : {uint64_t{2048}, uint64_t{kMiB}}) {  // moved, pinned
    Rig rig({{"w", 32, dense(4)}}, {.budget_bytes = budget});
    const auto keys = dense(4);
    const auto iteration = [&](Cache& cache) {
      for (int batch = 0; batch < 3; ++batch) add(cache, 0, keys, 1.5F);
      cache.table_clock(0);
    };
    rig.record(iteration);
    for (int i = 1; i <= 5; ++i) {
      iteration(*rig.cache);
      EXPECT_EQ(first_of(*rig.cache, 0, keys), 4.5F * static_cast<float>(i));
    }
  }
}

TEST(Cache, ATableCanBeClockedByItsLastUpdate) {
  for (const uint64_t budget : {uint64_t{2048}, uint64_t{kMiB}}) {
    Rig rig({{"w", 32, dense(4)}}, {.budget_bytes = budget, .strict = true, .infer_clocks = true});
    const auto keys = dense(4);
    const auto iteration = [&](Cache& cache) {
      const float before = first_of(cache, 0, keys);
      for (int batch = 0; batch < 2; ++batch) add(cache, 0, keys, 1);
      return before;
    };
    rig.record(iteration);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(iteration(*rig.cache), 2 * static_cast<float>(i));
  }
}

// A sequence that is recorded while another goes on: its end clocks it, and so do its last Updates
// from then on.
TEST(Cache, ATableThatItsLastUpdateClocksCanBeRecordedAgain) {
  Rig rig({{"w", 32, dense(4)}}, {.infer_clocks = true, .timeout = std::chrono::seconds(20)});
  const auto keys = dense(4);
  float clocks = 0;
  const auto iteration = [&](Cache& cache) {
    EXPECT_EQ(first_of(cache, 0, keys), 2 * clocks);
    for (int batch = 0; batch < 2; ++batch) add(cache, 0, keys, 1);
    ++clocks;
  };
  for (int times = 0; times < 2; ++times) {
    rig.cache->begin_gathering();
    iteration(*rig.cache);
    rig.cache->finish_sequence();
  }
  for (int i = 0; i < 5; ++i) iteration(*rig.cache);
  rig.cache->wait_all();
  EXPECT_EQ(rig.cache->stats().pushes, 7u);
}

// Where a read is held for longer, the budget decides whether the Update has memory of its own.
TEST(Cache, ALastUpdateClocksItsTableOutsideOfTheSequenceToo) {
  for (const uint64_t budget : {uint64_t{1024}, uint64_t{kMiB}}) {
    Rig rig({{"w", 32, dense(4)}, {"v", 32, dense(4)}},
            {.budget_bytes = budget, .infer_clocks = true, .timeout = std::chrono::seconds(20)});
    const auto keys = dense(4);
    Cache& cache = *rig.cache;
    const auto layer = [&](uint32_t table) {
      const float before = first_of(cache, table, keys);
      add(cache, table, keys, 1);
      return before;
    };
    rig.record([&](Cache&) {
      layer(0);
      layer(1);
    });
    EXPECT_EQ(cache.placement().entries[0].pinned, budget == kMiB);
    uint64_t pushes = 0;
    for (int i = 0; i < 6; ++i) {
      SCOPED_TRACE(::testing::Message() << "budget " << budget << ", iteration " << i);
      const auto clocks = static_cast<float>(i);
      if (i % 3 == 1) {
        const ReadBuffer held(cache, 0, keys);  // until its update is over
        EXPECT_EQ(held.data()[7], clocks);
        add(cache, 0, keys, 1);
      } else if (i % 3 == 2) {  // its read is left out
        add(cache, 0, keys, 1);
      } else {
        EXPECT_EQ(layer(0), clocks);
      }
      EXPECT_EQ(layer(1), clocks);
      cache.wait_all();
      EXPECT_EQ(cache.stats().pushes, pushes += 2);
    }
    EXPECT_GT(cache.stats().outside_sequence, 0u);
  }
}

// Updates of zeros that have a sign: where the log of a clock has nothing yet, they are not added
// to zeros.
TEST(Cache, BitsDependNeitherOnTheBudgetNorOnPiecesNorOnPartitions) {
  const std::vector<uint64_t> a = {0, 1, 2, 3}, b = {4, 5, 6, 7}, odd = {7, 1, 5}, rest = {0, 2};
  const auto run = [&](uint64_t budget, uint32_t rows_per_piece, uint32_t partitions) {
    const std::vector<TableSpec> tables = {
        {.name = "w", .row_floats = 32, .keys = dense(8), .piece_bytes = rows_per_piece * 128}};
    JobSpec job = plain_job(tables);
    job.optimizer = "none";  // the parameters are the sums
    job.hyper.clear();
    const auto device = make_host_device({.budget_bytes = 4 * kMiB});
    StandaloneExchange exchange(job);
    Cache cache(*device, exchange, tables, {.budget_bytes = budget, .partitions = partitions});
    std::vector<std::vector<uint32_t>> bits;  // by clock
    const auto clock = [&](std::initializer_list<std::span<const uint64_t>> lists) {
      for (const auto& list : lists) add(cache, 0, list, 0.0F);  // -0
      cache.table_clock(0);
      cache.wait_all();
      auto& of_clock = bits.emplace_back();
      for (size_t key = 0; key < exchange.keys(); ++key) {
        for (const float value : exchange.parameters(key)) {
          of_clock.push_back(std::bit_cast<uint32_t>(value));
        }
      }
    };
    clock({odd});  // before there is a sequence
    clock({odd, a});
    cache.begin_virtual();
    for (const auto& list : {a, b}) add(cache, 0, list, 0);
    cache.table_clock(0);
    cache.finish_sequence();
    EXPECT_EQ(cache.placement().entries[0].pinned, budget == kMiB);
    clock({a, b});
    clock({a});
    clock({a, b});  // what has not been updated lately, too
    clock({odd});
    clock({odd, rest});
    clock({odd, a, b});
    clock({a, odd, b});
    return bits;
  };
  const auto moved = run(2048, 8, 1);
  for (const uint32_t rows_per_piece : {1, 3, 4, 8}) {
    for (const uint32_t partitions : {1, 2, 3}) {
      EXPECT_EQ(run(2048, rows_per_piece, partitions), moved) << rows_per_piece << partitions;
      EXPECT_EQ(run(kMiB, rows_per_piece, partitions), moved) << rows_per_piece << partitions;
    }
  }
  constexpr uint32_t kMinusZero = 0x8000'0000;
  EXPECT_EQ(moved[2], std::vector<uint32_t>(256, kMinusZero));
  EXPECT_EQ(moved[4], std::vector<uint32_t>(256, kMinusZero));
  for (const size_t clock : {0, 5}) {  // of odd rows
    for (size_t row = 0; row < 8; ++row) {
      const bool updated = std::ranges::count(odd, row) > 0;
      EXPECT_EQ(moved[clock][32 * row], updated ? kMinusZero : 0u) << clock << " " << row;
    }
  }
}

TEST(Cache, ReadMyWritesShowsUpdatesThatAreNotClocked) {
  for (const uint64_t budget : {uint64_t{4096}, uint64_t{kMiB}}) {
    Rig rig({{.name = "w", .row_floats = 32, .keys = dense(4), .read_my_writes = true}},
            {.budget_bytes = budget});
    const auto all = dense(4);
    const std::vector<uint64_t> some = {3, 1};
    const auto iteration = [&](Cache& cache, float expected) {
      const auto check = [&](std::span<const uint64_t> keys, float value) {
        const ReadBuffer read(cache, 0, keys);
        if (read.data() == nullptr) return;
        for (size_t i = 0; i < read.buffer().floats(); ++i) EXPECT_EQ(read.data()[i], value);
      };
      check(all, expected);
      add(cache, 0, all, 1);
      check(all, expected + 1);
      add(cache, 0, some, 2);
      check(some, expected + 3);
      cache.table_clock(0);
    };
    rig.record([&](Cache& cache) { iteration(cache, 0); });
    const std::vector<uint64_t> others = {0, 2};
    for (int i = 0; i < 5; ++i) {
      const float before = 3 * static_cast<float>(i);
      iteration(*rig.cache, before);
      add(*rig.cache, 0, others, 2);  // outside the sequence
      EXPECT_EQ(first_of(*rig.cache, 0, others), before + 3);
      rig.cache->table_clock(0);
    }
  }
}

struct HeldRig {
  explicit HeldRig(std::vector<TableSpec> specs, CacheOptions options = {},
                   std::optional<uint32_t> slack = 0,
                   HostDeviceOptions device_options = {.budget_bytes = 4 * kMiB})
      : tables(std::move(specs)), exchange(tables) {
    device_options.pages = &pages;
    device = make_host_device(device_options);
    exchange.slack_is = slack;
    cache.emplace(*device, exchange, tables, options);
  }
  template <class Iteration>
  void record(Iteration iteration) {
    cache->begin_virtual();
    iteration();
    cache->finish_sequence();
  }

  std::vector<TableSpec> tables;
  phub::testing::StrictPages pages;
  std::unique_ptr<HostDevice> device;
  HeldExchange exchange;
  std::optional<Cache> cache;
};

TEST(Cache, AReadThatIsNeverFreshEnoughSaysWhatIsMissing) {
  HeldRig rig({{"w", 4, dense(2)}}, {.timeout = milliseconds(1000)});
  const auto keys = dense(2);
  add(*rig.cache, 0, keys, 1);
  rig.cache->table_clock(0);
  expect_error(ErrorCode::kTimeout,
               AllOf(HasSubstr("'w' as of clock 1"), HasSubstr("clock 0 is here"),
                     HasSubstr("Missing ranks, of 4: 2, 3")),
               [&] { first_of(*rig.cache, 0, keys); });
  rig.exchange.wait_for_push(1);
  rig.exchange.answer(0);
  rig.cache->wait_all();
  EXPECT_EQ(first_of(*rig.cache, 0, keys), 1);  // a late answer mends it
}

TEST(Cache, AStaleReadDoesNotWait) {
  for (const bool pinned : {false, true}) {
    HeldRig rig({{.name = "w", .row_floats = 32, .keys = dense(4), .max_staleness = 1}},
                {.budget_bytes = pinned ? kMiB : 1536});
    const auto keys = dense(4);
    Cache& cache = *rig.cache;
    const auto iteration = [&](float value) {
      (void)first_of(cache, 0, keys, 1);
      add(cache, 0, keys, value);
      cache.table_clock(0);
    };
    cache.begin_virtual();
    iteration(0);
    cache.finish_sequence();
    EXPECT_EQ(cache.placement().entries[0].pinned, pinned);
    iteration(1);
    rig.exchange.wait_for_push(1);
    {
      const ReadBuffer read(cache, 0, keys, 1);  // the result is not here
      EXPECT_EQ(read.data()[5], 0);
      EXPECT_EQ(read.buffer().age, 0);
    }
    add(cache, 0, keys, 10);  // goes into the log of the next clock meanwhile
    rig.exchange.answer(0);
    EXPECT_EQ(first_of(cache, 0, keys, 0), 1);
    cache.table_clock(0);
    rig.exchange.wait_for_push(2);
    rig.exchange.answer(0);
    EXPECT_EQ(first_of(cache, 0, keys), 11);
  }
}

// Fetched rows have waited for the result of their piece, pinned rows are those of the table.
TEST(Cache, TheAgeOfAStaleReadIsThatOfItsOldestRow) {
  const auto all = dense(4);
  const auto part = std::span(all).first(2);
  const auto make = [](uint64_t budget) {
    return std::make_unique<HeldRig>(
        std::vector<TableSpec>{{.name = "w",
                                .row_floats = 64,
                                .keys = dense(4),
                                .max_staleness = 1,
                                .piece_bytes = 2 * 64 * sizeof(float)}},
        CacheOptions{.budget_bytes = budget});
  };
  const auto iteration = [&](Cache& cache) {
    (void)first_of(cache, 0, part);  // two entries: the rows of each piece
    (void)first_of(cache, 0, all);
    add(cache, 0, all, 1);
    cache.table_clock(0);
  };
  // Only the second piece's rows are to be pinned.
  std::unique_ptr<HeldRig> rig;
  for (uint64_t budget = 2048; budget < 8192; budget += 256) {
    rig = make(budget);
    rig->cache->begin_virtual();
    iteration(*rig->cache);
    try {
      rig->cache->finish_sequence();
    } catch (const Error&) {
      continue;
    }
    const auto& entries = rig->cache->placement().entries;
    if (!entries[0].pinned && entries[1].pinned) break;
  }
  Cache& cache = *rig->cache;
  ASSERT_TRUE(!cache.placement().entries[0].pinned && cache.placement().entries[1].pinned);
  iteration(cache);
  rig->exchange.wait_for_push(2);
  const uint64_t before = cache.stats().bytes_to_device;
  rig->exchange.answer(0);
  // The first piece is fetched ahead, for both reads.
  while (cache.stats().bytes_to_device < before + 2 * 512) std::this_thread::yield();
  (void)first_of(cache, 0, part);
  {
    const ReadBuffer read(cache, 0, all, 1);
    EXPECT_EQ(read.buffer().age, 0);
    EXPECT_EQ(read.data()[2 * 64], 0) << "the second piece's result is not here";
  }
  rig->exchange.answer(1);
  const ReadBuffer read(cache, 0, all);
  EXPECT_EQ(read.buffer().age, 1);
  EXPECT_EQ(read.data()[2 * 64], 1);
}

// The read waits for copies of the last result, which take long, while the log of its clock is
// complete: that goes out afterwards.
TEST(Cache, AReadThatTakesLongDoesNotHoldUpThePushForEver) {
  HeldRig rig({{.name = "w", .row_floats = 32, .keys = dense(4), .max_staleness = 1}},
              {.budget_bytes = kMiB, .timeout = std::chrono::seconds(20)}, 0,
              {.budget_bytes = 4 * kMiB, .copy_bytes_per_second = 1e6});
  const auto keys = dense(4);
  Cache& cache = *rig.cache;
  const auto iteration = [&] {
    add(cache, 0, keys, 1);
    cache.table_clock(0);
    const ReadBuffer read(cache, 0, keys, 1);
    return read.buffer().age;
  };
  rig.record(iteration);
  ASSERT_TRUE(cache.placement().entries[0].pinned);
  const DeviceMemory there(*rig.device, 200'000, "there");
  const HostMemory here(*rig.device, there.bytes(), "here");
  const auto others = rig.device->make_stream("others");
  EXPECT_EQ(iteration(), 0);
  for (size_t clock = 1; clock <= 3; ++clock) {
    rig.exchange.wait_for_push(clock);
    others->copy_to_device(there.data(), here.data(), there.bytes());  // before the result's
    rig.exchange.answer(0);
    while (cache.stats().pulls < clock) std::this_thread::yield();
    EXPECT_EQ(iteration(), clock);
  }
  EXPECT_EQ(cache.stats().outside_sequence, 0u);
  rig.exchange.wait_for_push(4);
  rig.exchange.answer(0);
}

TEST(Cache, AReadCannotAskForMoreThanTheJobPromises) {
  const auto keys = dense(2);
  {
    HeldRig rig({{"w", 4, dense(2)}}, {}, 2);
    expect_error(ErrorCode::kInvalid, HasSubstr("the job's slack is 2"),
                 [&] { first_of(*rig.cache, 0, keys, 1); });
    expect_error(ErrorCode::kInvalid, HasSubstr("max_staleness"),
                 [&] { first_of(*rig.cache, 0, keys, 3); });
    EXPECT_EQ(first_of(*rig.cache, 0, keys, 2), 0);
  }
  HeldRig rig({{"w", 4, dense(2)}}, {}, std::nullopt);
  expect_error(ErrorCode::kInvalid, HasSubstr("asynchronous"),
               [&] { first_of(*rig.cache, 0, keys, 1); });
  const ReadBuffer read(*rig.cache, 0, keys);
  EXPECT_EQ(read.buffer().age, std::nullopt);
}

TEST(Cache, ALayerIsPushedWhileTheLayersBelowAreComputed) {
  const std::vector<TableSpec> tables = {{"bottom", 4, dense(2)}, {"top", 4, dense(2)}};
  const auto device = make_host_device({.budget_bytes = kMiB});
  const auto stream = device->make_stream("compute");
  HeldExchange exchange(tables);
  Cache cache(*device, exchange, tables, {.compute = stream.get()});
  const auto keys = dense(2);
  const auto backward = [&](uint32_t layer) {
    UpdateBuffer update(cache, layer, keys);
    stream->fill(update.data(), 1, 8);
    update.update();
    cache.table_clock(layer);
  };
  std::mutex gate;  // what the layers below wait for
  gate.lock();
  backward(1);
  stream->call([&] { const std::lock_guard wait(gate); });
  backward(0);
  exchange.wait_for_push(1);
  EXPECT_EQ(exchange.pushed(), std::vector<size_t>{1});
  gate.unlock();
  exchange.wait_for_push(2);
  exchange.answer(1);
  exchange.answer(0);
  cache.wait_all();
}

TEST(Cache, WhatTheExchangeThrowsEveryCallThrows) {
  HeldRig rig({{"w", 4, dense(2)}});
  const auto keys = dense(2);
  add(*rig.cache, 0, keys, 1);
  rig.cache->table_clock(0);
  rig.exchange.wait_for_push(1);
  rig.exchange.fail(Error(ErrorCode::kRankLost, "rank 3 is lost"));
  const auto lost = HasSubstr("rank 3 is lost");
  expect_error(ErrorCode::kRankLost, lost, [&] { rig.cache->wait_all(); });
  expect_error(ErrorCode::kRankLost, lost, [&] { first_of(*rig.cache, 0, keys); });
  expect_error(ErrorCode::kRankLost, lost, [&] { rig.cache->table_clock(0); });
}

TEST(Cache, ADeviceThatFailsInMidCopyIsOneClearError) {
  for (const auto direction : {HostDevice::Direction::kToDevice, HostDevice::Direction::kToHost}) {
    Rig rig({{"w", 512, dense(8)}}, {.budget_bytes = 64 << 10});
    const auto keys = dense(8);
    const auto iteration = [&](Cache& cache) {
      (void)first_of(cache, 0, keys);
      add(cache, 0, keys, 1);
      cache.table_clock(0);
    };
    rig.record(iteration);
    iteration(*rig.cache);
    rig.device->fail_copy(direction, 1, 100);
    const auto origin = HasSubstr("failed after 100 bytes");
    const auto fails = [&](auto run) {  // the first to hear of it hears kInternal
      try {
        run();
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_TRUE(e.code() == ErrorCode::kInternal || e.code() == ErrorCode::kUnavailable);
        EXPECT_THAT(std::string(e.what()), origin);
      }
    };
    fails([&] {
      for (int i = 0; i < 100; ++i) iteration(*rig.cache);
    });
    fails([&] { rig.cache->table_clock(0); });
    fails([&] { rig.cache->wait_all(); });
  }
}

// Rows that have to be gathered on the host, where no memory is left for that.
TEST(Cache, AReadThatFailsGivesBackWhatItHad) {
  Rig rig({{.name = "w", .row_floats = 32, .keys = dense(64), .read_my_writes = true}},
          {.reserved_bytes = 64 << 10, .timeout = std::chrono::seconds(20)},
          {.budget_bytes = 4 * kMiB, .poison_copies = true, .host_budget_bytes = kMiB});
  Cache& cache = *rig.cache;
  std::vector<uint64_t> odd;
  for (uint64_t i = 0; i < 32; ++i) odd.push_back(63 - 2 * i);
  const auto all = dense(64);
  add(cache, 0, all, 1);
  cache.wait_all();  // it is in the log
  {
    std::vector<HostMemory> rest;  // of the host's memory
    for (size_t bytes = kMiB; bytes > 0;) {
      try {
        rest.emplace_back(*rig.device, bytes, "rest");
      } catch (const Error&) {
        bytes /= 2;
      }
    }
    for (int times = 0; times < 100; ++times) {  // more than the device has memory for
      expect_error(ErrorCode::kFull, HasSubstr("staging of rows"),
                   [&] { (void)first_of(cache, 0, odd); });
    }
  }
  for (int clock = 1; clock <= 3; ++clock) {
    EXPECT_EQ(first_of(cache, 0, odd), static_cast<float>(clock));
    cache.table_clock(0);
    cache.wait_all();
    EXPECT_EQ(first_of(cache, 0, odd), static_cast<float>(clock));
    add(cache, 0, all, 1);
  }
}

TEST(Cache, LocalDataThatIsPinnedStaysWhereItIs) {
  Rig rig({{"w", 4, dense(2)}, {"h", 16, dense(8), true}});
  const auto rows = dense(8);
  const auto iteration = [&](Cache& cache) {
    { const LocalBuffer forward(cache, 1, rows, Fetch::kNo); }
    { const LocalBuffer backward(cache, 1, rows); }
  };
  rig.record(iteration);
  const DeviceStats before = rig.device->stats();
  const float* place = nullptr;
  for (int i = 0; i < 4; ++i) {
    LocalBuffer forward(*rig.cache, 1, rows, Fetch::kNo);
    if (place == nullptr) place = forward.data();
    EXPECT_EQ(forward.data(), place);
    forward.data()[3] = static_cast<float>(i);
  }
  EXPECT_EQ(rig.device->stats().copies, before.copies);
}

TEST(Cache, FlagsSpareTheCopies) {
  // Two sets of rows, of which only one fits.
  std::vector<uint64_t> a(32), b(32);
  std::iota(a.begin(), a.end(), 0);
  std::iota(b.begin(), b.end(), 32);
  const auto use = [&](Cache& cache, std::span<const uint64_t> rows, Fetch fetch, Save save) {
    const LocalBuffer buffer(cache, 1, rows, fetch, save);
  };
  const auto bytes_of = [&](Fetch fetch, Save save) {
    Rig fresh({{"w", 1, dense(1)}, {"h", 256, dense(64), true}},
              {.budget_bytes = 40 << 10, .reserved_bytes = 256});
    const auto iteration = [&](Cache& cache) {
      use(cache, a, fetch, save);
      use(cache, b, fetch, save);
    };
    fresh.record(iteration);
    for (int i = 0; i < 8; ++i) iteration(*fresh.cache);
    const CacheStats stats = fresh.cache->stats();
    return std::pair(stats.bytes_to_device > 0, stats.bytes_to_host > 0);
  };
  EXPECT_EQ(bytes_of(Fetch::kYes, Save::kYes), std::pair(true, true));
  EXPECT_EQ(bytes_of(Fetch::kNo, Save::kYes), std::pair(false, true));
  EXPECT_EQ(bytes_of(Fetch::kYes, Save::kNo), std::pair(true, false));
  EXPECT_EQ(bytes_of(Fetch::kNo, Save::kNo), std::pair(false, false));
}

// Saved as one piece by the copy engine, fetched in pieces by a thread.
TEST(Cache, RowsAreReadInAnyOrderAfterTheyAreSaved) {
  Rig rig({{"w", 1, dense(1)}, {"h", 4, dense(64), true}},
          {.budget_bytes = 2048, .reserved_bytes = 1, .prefetch = false},
          {.budget_bytes = 4 * kMiB, .copy_latency = milliseconds(3)});
  const auto in_order = dense(64);
  std::vector<uint64_t> shuffled = in_order;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));
  const auto iteration = [&](Cache& cache, float value) {
    {
      const LocalBuffer all(cache, 1, in_order, Fetch::kNo);
      if (all.data() != nullptr) std::fill_n(all.data(), all.buffer().floats(), value);
    }
    const LocalBuffer all(cache, 1, shuffled, Fetch::kYes, Save::kNo);
    if (all.data() == nullptr) return;
    for (size_t i = 0; i < all.buffer().floats(); ++i) ASSERT_EQ(all.data()[i], value);
  };
  rig.record([&](Cache& cache) { iteration(cache, 0); });
  ASSERT_FALSE(rig.cache->placement().entries[0].pinned);
  for (int i = 1; i <= 5; ++i) iteration(*rig.cache, static_cast<float>(i));
  EXPECT_GT(rig.cache->stats().bytes_staged, 0u);
}

// The middle one was recorded as one that saves nothing: what comes after it was filled already.
TEST(Cache, ASaveThatWasNotRecordedIsSeen) {
  Rig rig({{"w", 1, dense(1)}, {"h", 64, dense(4), true}},
          {.budget_bytes = 3072 + 256, .reserved_bytes = 1});
  const auto rows = dense(4);
  const std::vector<uint64_t> orders[] = {{3, 2, 1, 0}, {1, 0, 3, 2}, {2, 3, 0, 1}};
  const auto iteration = [&](Cache& cache, bool irregular, float value) {
    const auto set = [&](const LocalBuffer& buffer, float to) {
      if (buffer.data() != nullptr) std::fill_n(buffer.data(), buffer.buffer().floats(), to);
    };
    {
      const LocalBuffer first(cache, 1, rows, Fetch::kNo);
      set(first, value);
    }
    {
      const LocalBuffer second(cache, 1, orders[0], Fetch::kYes,
                               irregular ? Save::kYes : Save::kNo);
      if (second.data() != nullptr) std::this_thread::sleep_for(milliseconds(3));
      if (irregular) set(second, value + 0.5F);
    }
    for (const size_t order : {1, 2}) {
      const LocalBuffer after(cache, 1, orders[order], Fetch::kYes, Save::kNo);
      if (after.data() == nullptr) continue;
      EXPECT_EQ(after.data()[7], irregular ? value + 0.5F : value) << "order " << order;
    }
  };
  rig.record([&](Cache& cache) { iteration(cache, false, 0); });
  const Placement& placement = rig.cache->placement();
  ASSERT_FALSE(placement.entries[0].pinned);
  ASSERT_NE(placement.accesses[1].offset, placement.accesses[2].offset);
  for (int i = 1; i <= 8; ++i) iteration(*rig.cache, i % 4 == 2, static_cast<float>(i));
}

TEST(Cache, ASaveBesideASequenceOfClocksAloneIsSeen) {
  Rig rig({{"w", 1, dense(1)}, {"h", 4, dense(4), true}},
          {.budget_bytes = 4096, .reserved_bytes = 1});
  rig.record([](Cache& cache) { cache.table_clock(0); });
  for (float value = 1; value <= 3; ++value) {
    {
      const LocalBuffer saved(*rig.cache, 1, dense(4), Fetch::kNo);
      std::fill_n(saved.data(), saved.buffer().floats(), value);
    }
    const LocalBuffer after(*rig.cache, 1, dense(4), Fetch::kYes, Save::kNo);
    EXPECT_EQ(after.data()[15], value);
  }
}

TEST(Cache, ThreadsOfTheCacheMoveTheBytesAheadOfTime) {
  std::vector<TableSpec> tables = {{"w", 1, dense(1)}};
  for (int i = 0; i < 8; ++i) tables.push_back({"h" + std::to_string(i), 1024, dense(32), true});
  Rig rig(tables, {.budget_bytes = 700 << 10});
  const auto rows = dense(32);
  const auto iteration = [&](Cache& cache) {
    for (uint32_t layer = 1; layer <= 8; ++layer) {
      const LocalBuffer buffer(cache, layer, rows);
      if (buffer.data() == nullptr) continue;
      for (size_t i = 0; i < buffer.buffer().floats(); ++i) buffer.data()[i] += 1;
      std::this_thread::sleep_for(milliseconds(1));
    }
  };
  rig.record(iteration);
  for (int i = 0; i < 6; ++i) iteration(*rig.cache);
  const CacheStats stats = rig.cache->stats();
  EXPECT_GT(stats.bytes_to_device, 0U);
  EXPECT_GT(stats.prefetched, 0U);
  EXPECT_EQ(stats.bytes_copied_by_caller, 0U);
  EXPECT_EQ(stats.outside_sequence, 0U);
  const LocalBuffer last(*rig.cache, 8, rows);
  EXPECT_EQ(last.data()[1000], 6);
}

// What a cache without copies by the caller's thread is measured by: it counts where there are
// some.
TEST(Cache, BytesThatTheCallersThreadCopiesAreCounted) {
  const auto keys = dense(4);
  const std::vector<uint64_t> some = {2, 0};
  for (const bool pinned : {false, true}) {
    for (const bool in_stream : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "pinned " << pinned << ", in a stream " << in_stream);
      const auto device = make_host_device({.budget_bytes = kMiB});
      const auto stream = in_stream ? device->make_stream("compute") : nullptr;
      const std::vector<TableSpec> tables = {{"w", 32, dense(4)}};
      JobSpec job = plain_job(tables);
      job.on_nonfinite = "pass";  // nothing is written into the buffers
      StandaloneExchange exchange(job);
      Cache cache(*device, exchange, tables,
                  {.budget_bytes = pinned ? kMiB / 2 : 1792,
                   .reserved_bytes = 512,
                   .compute = stream.get()});
      uint64_t before = 0;
      const auto copied = [&] {  // since it was asked last
        const uint64_t all = cache.stats().bytes_copied_by_caller;
        return all - std::exchange(before, all);
      };
      const auto iteration = [&] {
        cache.post_read(cache.read(0, keys).handle);
        cache.update(cache.pre_update(0, keys).handle);
        cache.table_clock(0);
      };
      cache.begin_virtual();
      iteration();
      cache.finish_sequence();
      ASSERT_EQ(cache.placement().entries[0].pinned, pinned);
      EXPECT_EQ(copied(), pinned ? 512u : 0u) << "the sequence changes";
      for (int i = 0; i < 3; ++i) {
        iteration();
        EXPECT_EQ(copied(), pinned && !in_stream ? 2 * 512u : 0u) << "rows, and their log";
      }
      cache.wait_all();
      cache.post_read(cache.read(0, some).handle);
      EXPECT_EQ(copied(), pinned && in_stream ? 0u : 256u) << "outside of the sequence";
      if (stream) stream->synchronize();
    }
  }
  const std::vector<TableSpec> tables = {
      {.name = "w", .row_floats = 32, .keys = dense(4), .max_staleness = 1}};
  const auto device = make_host_device({.budget_bytes = kMiB});
  StandaloneExchange exchange(plain_job(tables));
  const Cache twice(*device, exchange, tables);
  EXPECT_EQ(twice.stats().bytes_copied_by_caller, 512u);
}

// The log of the clock before is still here when the buffer is to be given back.
TEST(Cache, AnUpdateThatTimesOutIsStillHeld) {
  for (const bool in_sequence : {false, true}) {
    HeldRig rig({{"w", 32, dense(4)}}, {.timeout = milliseconds(1000)});
    const auto keys = dense(4);
    Cache& cache = *rig.cache;
    if (in_sequence) {
      rig.record([&] {
        add(cache, 0, keys, 1);
        cache.table_clock(0);
      });
      ASSERT_TRUE(cache.placement().entries[0].pinned);
    }
    add(cache, 0, keys, 1);
    cache.table_clock(0);
    rig.exchange.wait_for_push(1);
    const Buffer buffer = cache.pre_update(0, keys);
    std::fill_n(buffer.data, buffer.floats(), -1.0F);
    cache.table_clock(0);  // of no updates; it goes out when the first has come back
    expect_error(ErrorCode::kTimeout, HasSubstr("the push of 'w'"),
                 [&] { cache.update(buffer.handle); });
    rig.exchange.answer(0);
    rig.exchange.wait_for_push(2);
    rig.exchange.answer(0);
    cache.wait_all();
    cache.update(buffer.handle);
    cache.table_clock(0);
    rig.exchange.wait_for_push(3);
  }
}

TEST(Cache, AScopeWhoseUpdateTimesOutGivesItsBufferBack) {
  HeldRig rig({{"w", 32, dense(4)}}, {.timeout = milliseconds(1000)});
  const auto keys = dense(4);
  Cache& cache = *rig.cache;
  add(cache, 0, keys, 1);
  cache.table_clock(0);
  rig.exchange.wait_for_push(1);
  {
    UpdateBuffer update(cache, 0, keys);
    cache.table_clock(0);  // of no updates; it goes out when the first has come back
    expect_error(ErrorCode::kTimeout, HasSubstr("the push of 'w'"), [&] { update.update(); });
  }
  EXPECT_NO_THROW(cache.begin_virtual());  // nothing is in use
  rig.exchange.answer(0);
  rig.exchange.wait_for_push(2);
  rig.exchange.answer(0);
}

// A sequence that does not fit: that before goes on, with what clocks its tables.
TEST(Cache, ASequenceThatFailsLeavesTheOneBefore) {
  HeldRig rig({{"w", 32, dense(4)}, {"h", 1024, dense(64), true}},
              {.budget_bytes = 64 << 10, .infer_clocks = true, .timeout = milliseconds(1000)});
  const auto keys = dense(4), rows = dense(64);
  Cache& cache = *rig.cache;
  rig.record([&] { add(cache, 0, keys, 1); });
  const auto too_large = [&] {
    add(cache, 0, keys, 1);
    cache.table_clock(0);
    const LocalBuffer h(cache, 1, rows);
  };
  expect_error(ErrorCode::kFull, HasSubstr("LocalAccess of 'h'"), [&] { rig.record(too_large); });
  add(cache, 0, keys, 1);
  rig.exchange.wait_for_push(1);
  // While a result is due nothing can be placed: later it can.
  uint64_t pushes = 1;
  for (const bool virtually : {true, false}) {
    virtually ? cache.begin_virtual() : cache.begin_gathering();
    if (!virtually) {
      rig.exchange.answer(0);
      cache.wait_all();
      ++pushes;  // of what is recorded, at its end
    }
    for (int batch = 0; batch < 2; ++batch) add(cache, 0, keys, 1);
    for (int times = 0; times < 2; ++times) {
      expect_error(ErrorCode::kTimeout, HasSubstr("what was clocked"),
                   [&] { cache.finish_sequence(); });
    }
    rig.exchange.wait_for_push(pushes);
    rig.exchange.answer(0);
    cache.wait_all();
    cache.finish_sequence();
    for (int batch = 0; batch < 2; ++batch) add(cache, 0, keys, 1);
    rig.exchange.wait_for_push(++pushes);
  }
  rig.exchange.answer(0);
  EXPECT_EQ(first_of(cache, 0, keys), 7);
  EXPECT_EQ(rig.exchange.pushed().size(), 4u);
}

// The last result's copies into rows that were pinned are slow; other rows are there afterwards.
TEST(Cache, CopiesOfTheLastResultAreOverWhenTheSequenceChanges) {
  constexpr uint32_t kFloats = 1 << 18;
  Rig rig({{"w", kFloats, dense(3)}}, {.budget_bytes = 32 * kMiB},
          {.budget_bytes = 33 * kMiB, .copy_bytes_per_second = 1e8});
  const auto all = dense(3);
  Cache& cache = *rig.cache;
  const auto clock = [&](auto... lists) {
    const auto update = [&](std::span<const uint64_t> keys) {
      UpdateBuffer rows(cache, 0, keys);
      for (size_t i = 0; i < keys.size() && rows.data() != nullptr; ++i) {
        std::fill_n(rows.data() + i * kFloats, kFloats, -1.0F - static_cast<float>(keys[i]));
      }
      rows.update();
    };
    (update(lists), ...);
    cache.table_clock(0);
  };
  const std::vector<uint64_t> one = {0}, two = {1}, three = {2};
  rig.record([&](Cache&) { clock(one, two, three); });
  ASSERT_TRUE(cache.placement().entries[2].pinned);
  clock(one, two, three);
  cache.begin_gathering();
  clock(all);
  cache.finish_sequence();
  clock(all);
  cache.wait_all();
  const ReadBuffer read(cache, 0, all);
  for (size_t row = 0; row < 3; ++row) {
    const float* at = read.data() + row * kFloats;
    const float value = 3 * (1 + static_cast<float>(row));
    EXPECT_EQ(std::count(at, at + kFloats, value), kFloats) << row;
  }
}

TEST(Cache, ASequenceThatCannotBeChangedIsTheEnd) {
  Rig rig({{"w", 32, dense(64)}}, {.budget_bytes = kMiB},
          {.budget_bytes = 4 * kMiB, .host_budget_bytes = 1});
  std::vector<uint64_t> odd;
  for (uint64_t i = 0; i < 32; ++i) odd.push_back(63 - 2 * i);
  const auto why = HasSubstr("while the sequence changed: host: 4096 bytes");
  expect_error(ErrorCode::kInternal, why,
               [&] { rig.record([&](Cache& cache) { (void)first_of(cache, 0, odd); }); });
  expect_error(ErrorCode::kInternal, why, [&] { (void)first_of(*rig.cache, 0, dense(64)); });
}

TEST(Cache, RowsThatAreReadAgainSoonAreFetchedOnce) {
  for (const bool poison : {false, true}) {
    Rig rig({{"w", 32, dense(4)}},
            {.budget_bytes = 1536, .reserved_bytes = 1, .prefetch = false, .poison = poison});
    const auto keys = dense(4);
    const auto iteration = [&](Cache& cache, bool clock_between, float expected) {
      for (int times = 0; times < 3; ++times) {
        const ReadBuffer read(cache, 0, keys);
        if (read.data() != nullptr) {
          for (size_t i = 0; i < 128; ++i) ASSERT_EQ(read.data()[i], expected);
        }
        if (times == 1 && clock_between) cache.table_clock(0);
      }
      add(cache, 0, keys, 1);
      cache.table_clock(0);
    };
    rig.record([&](Cache& cache) { iteration(cache, false, 0); });
    ASSERT_FALSE(rig.cache->placement().entries[0].pinned);
    uint64_t before = 0;
    for (int i = 0; i < 5; ++i) {
      const bool clock_between = i == 2;  // then they are of an older clock
      iteration(*rig.cache, clock_between, static_cast<float>(i));
      rig.cache->wait_all();
      const uint64_t bytes = rig.cache->stats().bytes_to_device;
      EXPECT_EQ(bytes - before, clock_between ? 1024u : 512u) << "iteration " << i;
      before = bytes;
    }
    EXPECT_EQ(rig.cache->stats().outside_sequence, 0u);
  }
}

// The first of two reads is left out: its rows may be there, on their way, or never be fetched, and
// something else is in its memory.
TEST(Cache, RowsThatAreNotThereAreNotKept) {
  for (const bool prefetch : {false, true}) {
    Rig rig({{"w", 64, dense(4)},
             {"x", 64, dense(1), true},
             {"y", 64, dense(1), true},
             {"large", 64, dense(8)}},
            {.budget_bytes = 2560, .reserved_bytes = 1, .prefetch = prefetch},
            {.budget_bytes = 4 * kMiB, .copy_bytes_per_second = 2e5, .poison_copies = true});
    const auto keys = dense(4), one = dense(1), all = dense(8);
    add(*rig.cache, 0, keys, 1);
    add(*rig.cache, 3, all, 2);
    for (const uint32_t table : {0, 3}) rig.cache->table_clock(table);
    const auto iteration = [&](Cache& cache, bool whole) {
      if (whole) first_of(cache, 0, keys);
      {  // two calls that are where the sequence goes on
        const LocalBuffer x(cache, 1, one, Fetch::kNo, Save::kNo);
        const LocalBuffer y(cache, 2, one, Fetch::kNo, Save::kNo);
      }
      const float second = first_of(cache, 0, keys);
      first_of(cache, 3, all);
      return second;
    };
    rig.record([&](Cache& cache) { iteration(cache, true); });
    const std::vector<AccessPlace>& places = rig.cache->placement().accesses;
    ASSERT_TRUE(places[3].kept);
    ASSERT_EQ(places[4].offset, places[0].offset);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(iteration(*rig.cache, i % 3 == 0), 1) << "iteration " << i;
      std::this_thread::sleep_for(milliseconds(2));  // time to begin the next one's copies
    }
    EXPECT_EQ(rig.cache->stats().outside_sequence, 2u + 4u)
        << "x, where the first read was left out";
  }
}

TEST(Cache, StrictModeNamesTheDeviation) {
  Rig rig({{"w", 4, dense(4)}, {"v", 4, dense(4)}}, {.strict = true});
  const auto keys = dense(4);
  rig.record([&](Cache& cache) {
    (void)first_of(cache, 0, keys);
    (void)first_of(cache, 1, keys);
  });
  EXPECT_EQ(first_of(*rig.cache, 0, keys), 0);
  expect_error(ErrorCode::kInvalid,
               AllOf(HasSubstr("Read of 4 rows of 'w'"), HasSubstr("step 2"),
                     HasSubstr("Read of 4 rows of 'v'")),
               [&] { first_of(*rig.cache, 0, keys); });
  const std::vector<uint64_t> some = {1};
  expect_error(ErrorCode::kInvalid, HasSubstr("the keys differ"),
               [&] { first_of(*rig.cache, 1, some); });
  EXPECT_EQ(first_of(*rig.cache, 1, keys), 0);
}

// Another exchange in the same memory: only one cache may wait for what an exchange returns.
class SameMemory : public HeldExchange {
 public:
  SameMemory(std::span<const TableSpec> tables, HeldExchange& memory)
      : HeldExchange(tables), memory_(memory) {}
  std::span<float> gradient(size_t key) override { return memory_.gradient(key); }
  std::span<const float> parameters(size_t key) const override { return memory_.parameters(key); }

 private:
  HeldExchange& memory_;
};

// Parameters whose pages cannot be written, and gradients right behind them.
TEST(Cache, AnExchangesMemoryIsPinnedAsItIsMapped) {
  const std::vector<TableSpec> tables = {
      {"a", 1, dense(100)},
      {"b", 1, dense(5000)},
      {.name = "c", .row_floats = 3, .keys = dense(7), .max_staleness = 1}};
  phub::testing::StrictPages pages;
  HeldExchange exchange(tables);
  const auto device = make_host_device({.budget_bytes = kMiB, .pages = &pages});
  const auto other = make_host_device({.budget_bytes = kMiB, .pages = &pages});
  {
    const PinnedMemory taken(*other, exchange.gradient(1).data() + 1024, 4, HostUse::kRead, "x");
    expect_error(ErrorCode::kInvalid, HasSubstr("pin the same ranges"),
                 [&] { const Cache cache(*device, exchange, tables); });
    EXPECT_EQ(pages.registrations(), 1u);
  }
  EXPECT_EQ(device->stats().host_bytes, 0u);
  {
    SameMemory twin(tables, exchange);
    const Cache cache(*device, exchange, tables), second(*other, twin, tables);
    EXPECT_EQ(pages.registrations(), 2u);
  }
  EXPECT_EQ(pages.registrations(), 0u);
  EXPECT_EQ(pages.refused(), 0u);
}

TEST(Cache, StrictModeGoesOnWhereItIsAfterADeviation) {
  Rig rig({{"w", 32, dense(4)}, {"v", 32, dense(4)}, {"u", 32, dense(4)}},
          {.budget_bytes = 1536,
           .reserved_bytes = 1,
           .strict = true,
           .timeout = std::chrono::seconds(20)});
  const auto keys = dense(4);
  const auto iteration = [&](Cache& cache) {
    for (const uint32_t table : {0, 1, 2}) (void)first_of(cache, table, keys);
  };
  rig.record(iteration);
  iteration(*rig.cache);
  expect_error(ErrorCode::kInvalid, HasSubstr("Read of 4 rows of 'v'"),
               [&] { (void)first_of(*rig.cache, 1, keys); });
  expect_error(ErrorCode::kInvalid, HasSubstr("step 0 was left out"),
               [&] { (void)first_of(*rig.cache, 2, keys); });
  for (int i = 0; i < 4; ++i) iteration(*rig.cache);
}

TEST(Cache, WrongCallsAreRefusedAndChangeNothing) {
  Rig rig({{"w", 4, {7, 9}}, {"h", 4, dense(4), true}});
  Cache& cache = *rig.cache;
  const std::vector<uint64_t> keys = {7, 9};
  const auto rows = dense(4);
  const auto refuse = [&](const char* what, auto run) {
    expect_error(ErrorCode::kInvalid, HasSubstr(what), run);
  };
  refuse("table 2: there are 2", [&] { (void)cache.read(2, keys); });
  refuse("'w', which holds parameters", [&] { (void)cache.local_access(0, keys); });
  refuse("'h', which holds local data", [&] { (void)cache.read(1, rows); });
  refuse("'h', which holds local data", [&] { cache.table_clock(1); });
  refuse("'w' has no row 8", [&] { (void)cache.read(0, std::vector<uint64_t>{7, 8}); });
  refuse("row 7 of 'w' twice", [&] { (void)cache.read(0, std::vector<uint64_t>{7, 7}); });
  refuse("no rows", [&] { (void)cache.pre_update(0, {}); });
  refuse("there never was one", [&] { cache.post_read(99); });
  const Buffer read = cache.read(0, keys);
  refuse("it takes PostRead", [&] { cache.update(read.handle); });
  cache.post_read(read.handle);
  refuse("given back before", [&] { cache.post_read(read.handle); });
  const Buffer local = cache.local_access(1, rows);
  refuse("in use", [&] { (void)cache.local_access(1, std::vector<uint64_t>{2}); });
  refuse("in use", [&] { cache.begin_virtual(); });
  cache.post_local_access(local.handle);
  refuse("without begin", [&] { cache.finish_sequence(); });
  cache.table_clock(0);
  refuse("row 7 of 'w' twice", [&] { (void)cache.read(0, std::vector<uint64_t>{7, 7}); });
  refuse("TableClock of 'w' twice", [&] { cache.table_clock(0); });
  EXPECT_EQ(first_of(cache, 0, keys), 0);
  cache.table_clock(0);
  add(cache, 0, keys, 3);
  cache.table_clock(0);
  EXPECT_EQ(first_of(cache, 0, keys), 3);
}

TEST(Cache, ABudgetThatIsTooSmallNamesTheStep) {
  Rig rig({{"w", 4, dense(4)}, {"h", 1024, dense(64), true}}, {.budget_bytes = 64 << 10});
  const auto rows = dense(64);
  const auto keys = dense(4);
  expect_error(ErrorCode::kFull,
               AllOf(HasSubstr("at least 262144"), HasSubstr("LocalAccess of 'h'")),
               [&] { rig.record([&](Cache& cache) { const LocalBuffer h(cache, 1, rows); }); });
  // What fits goes on.
  add(*rig.cache, 0, keys, 1);
  rig.cache->table_clock(0);
  EXPECT_EQ(first_of(*rig.cache, 0, keys), 1);
  expect_error(ErrorCode::kFull, HasSubstr("262144 bytes for rows of 'h'"),
               [&] { const LocalBuffer h(*rig.cache, 1, rows); });
}

TEST(Cache, ABufferThatIsGivenBackIsPoison) {
  Rig rig({{"w", 4, dense(4)}}, {.poison = true});
  const auto keys = dense(4);
  rig.record([&](Cache& cache) { (void)first_of(cache, 0, keys); });
  const Buffer read = rig.cache->read(0, keys);
  EXPECT_EQ(read.data[0], 0);
  rig.cache->post_read(read.handle);
  EXPECT_TRUE(std::isnan(read.data[0]));
}

TEST(Cache, WhatTheTablesHoldStaysWhenTheSequenceChanges) {
  Rig rig({{"w", 4, dense(8)}, {"h", 4, dense(8), true}});
  const auto all = dense(8);
  const std::vector<uint64_t> some = {6, 2, 4};
  add(*rig.cache, 0, all, 1);
  {
    LocalBuffer h(*rig.cache, 1, all);
    std::fill_n(h.data(), 32, 5.0F);
  }
  for (int round = 0; round < 3; ++round) {
    const std::span<const uint64_t> keys = round % 2 == 0 ? std::span(all) : std::span(some);
    rig.record([&](Cache& cache) {
      (void)first_of(cache, 0, keys);
      add(cache, 0, keys, 1);
      const LocalBuffer h(cache, 1, keys);
    });
    const LocalBuffer h(*rig.cache, 1, keys);
    EXPECT_EQ(h.data()[11], 5);
  }
  rig.cache->table_clock(0);  // the update from before the first sequence
  EXPECT_EQ(first_of(*rig.cache, 0, all), 1);
}

TEST(Cache, TheTraceHasComputationCopiesAndExchanges) {
  const std::string path = std::filesystem::temp_directory_path() /
                           ("phub_cache_trace_" + std::to_string(getpid()) + ".json");
  {
    Rig rig({{"bottom", 256, dense(8)}, {"top", 256, dense(8)}},
            {.budget_bytes = 20 << 10, .reserved_bytes = 256, .trace = path});
    const auto keys = dense(8);
    const auto iteration = [&](Cache& cache) {
      for (const uint32_t layer : {0U, 1U}) (void)first_of(cache, layer, keys);
      for (const uint32_t layer : {1U, 0U}) {
        add(cache, layer, keys, 1);
        cache.table_clock(layer);
      }
    };
    rig.record(iteration);
    for (int i = 0; i < 3; ++i) iteration(*rig.cache);
    rig.cache->wait_all();
  }
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::map<std::string, std::set<std::string>> seen;  // name -> subjects
  const auto& events = trace.is_array() ? trace : trace.at("traceEvents");
  for (const auto& event : events) {
    if (!event.contains("name")) continue;
    seen[event["name"].get<std::string>()].insert(event.dump());
  }
  for (const char* name : {"in use", "fetch", "update", "push", "exchange"}) {
    bool found = false;
    for (const auto& [event, dumps] : seen) found |= event.find(name) != std::string::npos;
    EXPECT_TRUE(found) << name;
  }
  const std::string text = events.dump();
  EXPECT_NE(text.find("bottom"), std::string::npos);
  EXPECT_NE(text.find("top"), std::string::npos);
  std::filesystem::remove(path);
}

}  // namespace cache_test
}  // namespace phub::geeps
