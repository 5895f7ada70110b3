// Calls of rows that a fixed table's process has not recorded: they come to what they would come to
// otherwise, whatever the other threads do. That random ones change no bits, store_test tries.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {
namespace straying_test {

using phub::testing::Box;
using phub::testing::each_rank;

constexpr uint64_t kRows = 4096;  // 64 chunks

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

// A store of each rank, with one thread, which body() gets.
void each_store(const Box& box, const std::string& name, uint32_t ranks,
                const StoreOptions& options,
                const std::function<void(Store& store, StoreThread& mine, uint32_t rank)>& body) {
  each_rank(ranks, [&](uint32_t rank) {
    StoreOptions of_rank = options;
    of_rank.worker = worker_options(box, name, rank, ranks);
    Store store(of_rank);
    StoreThread mine(store, 0);
    body(store, mine, rank);
  });
}

// Adds 1 to every third row, and reads it.
void iterate_thirds(StoreThread& mine, uint32_t rank) {
  for (uint64_t row = rank; row < kRows; row += 3) {
    mine.update(0, row, int32_t{1});
    mine.read<int32_t>(0, row);
  }
  mine.clock();
}

// Rank 1 comes late to a row of rank 0, which has made its next clock by then if nothing keeps it
// from that; and reads it as it was in its own iteration.
TEST(Straying, IsSlower) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true}};
  each_store(box, "strays", 3, options, [&](Store& store, StoreThread& mine, uint32_t rank) {
    const auto chunks_in_ten_clocks = [&] {
      const uint64_t before = store.stats().worker.chunks_received;
      for (int clock = 0; clock < 10; ++clock) iterate_thirds(mine, rank);
      return store.stats().worker.chunks_received - before;
    };
    mine.begin_virtual();
    iterate_thirds(mine, rank);
    if (rank == 2) mine.read<int32_t>(0, 0);
    mine.finish();
    EXPECT_LE(chunks_in_ten_clocks(), 400U);  // of its third, and what ranks tell each other
    iterate_thirds(mine, rank);
    if (rank == 1) {
      mine.update(0, 1, int32_t{100});
      mine.update(0, 2, int32_t{1000});  // strays, with an update that is not clocked
      EXPECT_EQ(store.stats().widened, 1U);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(mine.read<int32_t>(0, 1), 111);
      EXPECT_EQ(mine.read<int32_t>(0, 2), 1011);
    }
    iterate_thirds(mine, rank);
    EXPECT_EQ(store.stats().widened, 1U);
    EXPECT_EQ(mine.read<int32_t>(0, 2), 1012);
    EXPECT_GE(chunks_in_ten_clocks(), 560U);  // of 64; some come later

    mine.begin_virtual();
    iterate_thirds(mine, rank);
    mine.finish();  // it is fixed again
    EXPECT_LE(chunks_in_ten_clocks(), 400U);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(mine.read<int32_t>(0, 3), 32);
    }
    iterate_thirds(mine, rank);
    EXPECT_EQ(store.stats().widened, 2U);
    EXPECT_EQ(mine.read<int32_t>(0, 3), 33);
  });
}

// Only read, and then updated; of a row that nobody has recorded; several at once.
TEST(Straying, WhoOnlyReadARowMayUpdateIt) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true},
                    {.name = "other", .rows = kRows, .type = "i32", .fixed = true}};
  each_store(box, "reads", 2, options, [](Store& store, StoreThread& mine, uint32_t rank) {
    mine.begin_virtual();
    mine.update(0, 10 + rank, int32_t{1});
    mine.read<int32_t>(0, 11 - rank);
    mine.update(1, rank, int32_t{1});
    mine.clock();
    mine.finish();
    const std::vector<uint64_t> rows = {10 + rank, 11 - rank, 4000};
    const std::vector<int32_t> by = {1, 2, 4};
    mine.update(0, 10 + rank, int32_t{100});
    if (rank == 0) mine.update_batch(0, rows, std::span<const int32_t>(by));
    mine.clock();
    std::vector<int32_t> got(3);
    mine.read_batch(0, std::vector<uint64_t>{10, 11, 4000}, std::span<int32_t>(got));
    EXPECT_EQ(got, (std::vector<int32_t>{101, 102, 4}));
    mine.update(1, rank, int32_t{7});
    mine.clock();
    EXPECT_EQ(store.stats().widened, 1U);  // the other table is as it was
    if (rank == 1) {
      EXPECT_EQ(mine.read<int32_t>(1, 0), 7);
      EXPECT_EQ(mine.read<int32_t>(1, 4001), 0);
    }
    mine.clock();
    EXPECT_EQ(store.stats().widened, 2U);
  });
}

// Its update reaches the others, although it was not to send any of this row.
TEST(Straying, AnUpdateOfARowThatWasOnlyReadIsNotLost) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true}};
  each_store(box, "only-read", 2, options, [](Store& store, StoreThread& mine, uint32_t rank) {
    mine.begin_virtual();
    mine.update(0, 100 * rank, int32_t{1});
    mine.read<int32_t>(0, 0);
    mine.clock();
    mine.finish();
    if (rank == 1) mine.update(0, 0, int32_t{10});
    mine.clock();
    EXPECT_EQ(mine.read<int32_t>(0, 0), 10);
    EXPECT_EQ(store.stats().widened, 1U);
    mine.clock();
  });
}

// A row that was asked for with the last clock of a job.
TEST(Straying, LosesNoChangeOfRows) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true},
                    {.name = "changes", .rows = 4, .type = "i32", .spare = 4}};
  each_store(box, "changes", 2, options, [](Store& store, StoreThread& mine, uint32_t rank) {
    mine.begin_virtual();
    mine.update(0, rank, int32_t{1});
    mine.clock();
    mine.finish();
    mine.clock();
    if (rank == 0) mine.add_row(1, 100);
    mine.clock();
    EXPECT_FALSE(mine.has_row(1, 100));
    if (rank == 1) mine.update(0, 0, int32_t{3});
    mine.clock();
    EXPECT_EQ(store.stats().widened, 1U);
    EXPECT_TRUE(mine.has_row(1, 100));
    EXPECT_EQ(mine.read<int32_t>(0, 0), 3);
  });
}

// What the other threads come to does not matter: a clock of their process or of another, the end
// of a recording, the whole table.
TEST(Straying, OthersMayDoSomethingElse) {
  Box box(2);
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = true}};
  options.threads = 2;
  each_rank(2, [&](uint32_t rank) {
    StoreOptions of_rank = options;
    of_rank.worker = worker_options(box, "else", rank, 2);
    Store store(of_rank);
    each_rank(2, [&](uint32_t t) {
      const uint64_t own = 2 * rank + t;
      StoreThread mine(store, t);
      const auto add_one = [&] {
        mine.update(0, own, int32_t{1});
        mine.clock();
      };
      for (int32_t turn = 0; turn < 3; ++turn) {
        mine.begin_virtual();
        add_one();
        mine.finish();
        add_one();
        if (own == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          EXPECT_EQ(mine.read<int32_t>(0, 3), 1 + 2 * turn);
        }
        add_one();
      }
      mine.begin_virtual();
      add_one();
      mine.finish();
      if (own == 0) {  // others: record
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_EQ(mine.read<int32_t>(0, 2), 6);
      }
      mine.begin_virtual();
      add_one();
      mine.finish();
    });
    StoreThread mine(store, 0);
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      std::thread next([&store] {
        StoreThread other(store, 1);
        EXPECT_EQ(other.read<int32_t>(0, 3), 6);
      });
      EXPECT_EQ(mine.read<int32_t>(0, 2), 6);
      next.join();
    }
    const std::vector<std::byte> table = store.table(0);
    EXPECT_EQ(store.stats().widened, 5U);
    std::vector<int32_t> first(5);
    std::memcpy(first.data(), table.data(), 20);
    EXPECT_EQ(first, (std::vector<int32_t>{6, 6, 6, 6, 0}));
    EXPECT_EQ(mine.read<int32_t>(0, 3 * rank), 6);  // of what was moved meanwhile
  });
}

}  // namespace straying_test
}  // namespace phub::iterstore
