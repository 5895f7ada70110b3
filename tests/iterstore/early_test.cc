// Batches that are pushed when the recorded sequence has done with them, before the clock: when
// that happens, and what becomes of calls that come later. That it changes no bits, store_test
// tries.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {
namespace early_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::expect_error;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr uint64_t kBatches = 4;
constexpr uint64_t kOfBatch = 256;  // rows: 4 chunks
constexpr uint64_t kRows = kBatches * kOfBatch;

StoreOptions options_with(uint32_t threads) {
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32"}};
  options.threads = threads;
  options.batches = kBatches;
  options.push_early = true;
  return options;
}

// A store of each of two ranks.
void each_store(const Box& box, const std::string& name, const StoreOptions& options,
                const std::function<void(Store& store, uint32_t rank)>& body) {
  each_rank(2, [&](uint32_t rank) {
    StoreOptions of_rank = options;
    JobSpec spec;
    spec.name = name;
    spec.world_size = 2;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    spec.chunk_elements = 64;
    of_rank.worker = box.options(spec);
    of_rank.worker.rank = static_cast<int32_t>(rank);
    Store store(of_rank);
    body(store, rank);
  });
}

// Reads all rows of a batch, and adds 1 to each. (The first begins with more reads, so that each
// begins in a part of its own.)
void add_to_batch(StoreThread& mine, uint64_t batch, int32_t want = -1) {
  for (int i = 0; i < 8 && batch == 0; ++i) mine.read<int32_t>(0, 0);
  for (uint64_t row = batch * kOfBatch; row < (batch + 1) * kOfBatch; ++row) {
    const auto got = mine.read<int32_t>(0, row);
    if (want >= 0) EXPECT_EQ(got, want) << row;
  }
  for (uint64_t row = batch * kOfBatch; row < (batch + 1) * kOfBatch; ++row) {
    mine.update(0, row, int32_t{1});
  }
}

void add_to_all(StoreThread& mine, int32_t want = -1) {
  for (uint64_t batch = 0; batch < kBatches; ++batch) add_to_batch(mine, batch, want);
  mine.clock();
}

void record(StoreThread& mine) {
  mine.begin_virtual();
  add_to_all(mine);
  mine.finish();
}

template <class Condition>
bool comes_true(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Also what is read behind a batch's last access is the state before the clock.
TEST(Early, ABatchTravelsBeforeTheClock) {
  Box box(2);
  each_store(box, "before", options_with(1), [](Store& store, uint32_t) {
    StoreThread mine(store, 0);
    record(mine);
    add_to_all(mine, 0);
    EXPECT_EQ(store.stats().pushed_early, kBatches);
    for (uint64_t batch = 0; batch < kBatches; ++batch) {
      const uint64_t chunks = store.stats().worker.chunks_pushed;
      add_to_batch(mine, batch, 2);
      EXPECT_EQ(store.stats().pushed_early, kBatches + batch + 1);
      EXPECT_TRUE(
          comes_true([&] { return store.stats().worker.chunks_pushed >= chunks + kOfBatch / 64; }));
    }
    for (uint64_t row = 0; row < kRows; ++row) EXPECT_EQ(mine.read<int32_t>(0, row), 3);
    mine.clock();
    add_to_all(mine, 4);
    EXPECT_EQ(mine.read<int32_t>(0, 0), 6);
  });
}

// Only when the last thread of the process has done with it. The other one reads and updates it
// meanwhile.
TEST(Early, ABatchWaitsForAllThreads) {
  Box box(2);
  each_store(box, "threads", options_with(2), [](Store& store, uint32_t) {
    std::barrier both(2);
    bool went = false;
    each_rank(2, [&](uint32_t t) {
      StoreThread mine(store, t);
      record(mine);
      add_to_all(mine, 0);
      both.arrive_and_wait();
      const uint64_t before = store.stats().pushed_early;
      both.arrive_and_wait();
      if (t == 0) {
        add_to_batch(mine, 0, 4);
        went = store.stats().pushed_early != before;
        if (!went) mine.update(0, 7, int32_t{10});  // late, but nothing was pushed yet
      }
      both.arrive_and_wait();
      ASSERT_FALSE(went);
      if (t == 1) {
        add_to_batch(mine, 0, 4);
        EXPECT_EQ(store.stats().pushed_early, before + 1);
      }
      both.arrive_and_wait();
      mine.clock();
      EXPECT_EQ(mine.read<int32_t>(0, 6), 8);
      EXPECT_EQ(mine.read<int32_t>(0, 7), 28);
      EXPECT_EQ(mine.read<int32_t>(0, kOfBatch), 4);
      mine.clock();
    });
  });
}

// Rank 1 updates row 100 or 101 once more after their batch went. It recorded that it updates 101.
TEST(Early, AnUpdateThatComesLaterIsNotLost) {
  Box box(2);
  StoreOptions options = options_with(1);
  options.batches = 1;
  for (const uint64_t late : {100, 101}) {
    each_store(box, "late" + std::to_string(late), options, [late](Store& store, uint32_t rank) {
      StoreThread mine(store, 0);
      const auto iterate = [&](int32_t clocks, int32_t more, bool comes_late) {
        for (uint64_t row = rank; row < kRows; row += 2) {
          const auto got = mine.read<int32_t>(0, row);
          if (!mine.is_virtual()) EXPECT_EQ(got, clocks + (row == late ? more : 0));
          mine.update(0, row, int32_t{1});
        }
        if (comes_late) {
          EXPECT_EQ(store.stats().pushed_early, 2U);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          mine.update(0, late, int32_t{100});
          EXPECT_EQ(store.stats().pushed_early, 0U);
          const int32_t own = late % 2 == rank ? 1 : 0;
          EXPECT_EQ(mine.read<int32_t>(0, late), clocks + own + 100);
          mine.update(0, late, int32_t{100});
        }
        mine.clock();
      };
      mine.begin_virtual();
      iterate(0, 0, false);
      mine.finish();
      iterate(0, 0, false);
      iterate(1, 0, rank == 1);
      iterate(2, 200, false);
      EXPECT_EQ(store.stats().pushed_early, 0U) << "until rows are placed anew";
      EXPECT_EQ(store.stats().widened, 0U);
      mine.begin_virtual();
      iterate(0, 0, false);
      mine.finish();
      iterate(3, 200, false);
      EXPECT_EQ(store.stats().pushed_early, 1U);
      EXPECT_EQ(mine.read<int32_t>(0, late), 204);
      EXPECT_EQ(mine.read<int32_t>(0, 102), 4);
      mine.clock();
    });
  }
}

// A row of another, fixed table is strayed from while a batch is on its way, at one of the ranks.
TEST(Early, WhatWentIsTakenBackIfARankStrays) {
  Box box(2);
  StoreOptions options = options_with(1);
  options.tables.push_back({.name = "fixed", .rows = kRows, .type = "i32", .fixed = true});
  each_store(box, "strays", options, [](Store& store, uint32_t rank) {
    StoreThread mine(store, 0);
    const auto iterate = [&](int32_t want, bool strays) {
      add_to_batch(mine, 0, want);
      mine.update(1, rank, int32_t{1});
      if (strays) {
        EXPECT_GE(store.stats().pushed_early, 1U);
        EXPECT_EQ(mine.read<int32_t>(1, 1 - rank), want / 2);
        EXPECT_EQ(store.stats().widened, 1U);
      }
      mine.clock();
    };
    mine.begin_virtual();
    iterate(-1, false);
    mine.finish();
    iterate(0, false);
    iterate(2, rank == 0);
    EXPECT_EQ(store.stats().widened, 1U);
    iterate(4, false);
    EXPECT_EQ(mine.read<int32_t>(1, rank), 3);
    mine.clock();
  });
}

// Whoever has only read may call what needs that nothing is under way.
TEST(Early, WhatIsOnlyReadIsNotPushed) {
  Box box(2);
  each_store(box, "reads", options_with(1), [](Store& store, uint32_t rank) {
    StoreThread mine(store, 0);
    const auto read_all = [&mine] {
      for (uint64_t row = 0; row < kRows; ++row) mine.read<int32_t>(0, row);
    };
    mine.begin_virtual();
    read_all();
    mine.clock();
    mine.finish();
    mine.clock();
    if (rank == 0) read_all();
    EXPECT_EQ(store.stats().pushed_early, 0U);
    mine.begin_virtual();
    mine.finish();
  });
}

TEST(Early, ARankThatDoesNotPushEarlyIsRefused) {
  Box box(2);
  std::array<std::string, 2> said;
  each_rank(2, [&](uint32_t rank) {
    StoreOptions options = options_with(1);
    options.tables[0].fixed = true;  // so that ranks ask each other in any case
    options.push_early = rank == 0;
    JobSpec spec;
    spec.name = "mixed";
    spec.world_size = 2;
    spec.join_limit_ms = 5000;
    options.worker = box.options(spec, rank);
    Store store(options);
    StoreThread mine(store, 0);
    try {
      record(mine);
    } catch (const Error& error) {
      said[rank] = error.what();
    }
  });
  EXPECT_THAT(said, Contains(HasSubstr("stray-early")));
}

// Thread 0 also recorded updates behind the clock, so that it begins anew within one.
TEST(Early, ABatchIsHeldWhereTheSequenceBeginsAnew) {
  Box box(2);
  StoreOptions options = options_with(2);
  options.batches = 1;
  each_store(box, "middle", options, [](Store& store, uint32_t) {
    std::barrier both(2);
    each_rank(2, [&](uint32_t t) {
      StoreThread mine(store, t);
      const auto add = [&mine] {
        for (uint64_t row = 0; row < kRows; ++row) mine.update(0, row, int32_t{1});
      };
      const auto iterate = [&](bool in_turn) {
        if (in_turn && t == 0) both.arrive_and_wait();
        add();
        if (in_turn && t == 1) both.arrive_and_wait();
        mine.clock();
        if (t == 0) add();
        if (in_turn) both.arrive_and_wait();
      };
      mine.begin_virtual();
      iterate(false);
      mine.finish();
      for (int i = 0; i < 4; ++i) {
        iterate(true);
        EXPECT_EQ(store.stats().pushed_early, 1U)
            << i << ": in the first clock, and not taken back";
        both.arrive_and_wait();
      }
      mine.clock();
      EXPECT_EQ(mine.read<int32_t>(0, 5), 2 * (4 + 4 + 4));
      mine.clock();
    });
  });
}

TEST(Early, IsForLockStepWithAnIndex) {
  StoreOptions options = options_with(1);
  options.worker.spec.name = "wrong";
  options.worker.spec.world_size = 1;
  options.worker.rank = 0;
  options.static_index = false;
  expect_error(ErrorCode::kInvalid, "push_early needs the static_index",
               [&] { Store refused(options); });
  options.static_index = true;
  options.worker.spec.consistency = "async";
  expect_error(ErrorCode::kInvalid, "push_early is for lock-step", [&] { Store refused(options); });
}

}  // namespace early_test
}  // namespace phub::iterstore
