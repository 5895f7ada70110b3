// A store that notices that the accesses are others than recorded: when it records again, on which
// ranks, and what holds afterwards. That it changes no bits, store_test tries.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "worker/iterstore/pattern_watch.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {
namespace gather_again_test {

using phub::testing::Box;
using phub::testing::each_rank;

constexpr uint64_t kRows = 1024;

StoreOptions options_with(double gather_again, bool fixed) {
  StoreOptions options;
  options.tables = {{.name = "t", .rows = kRows, .type = "i32", .fixed = fixed}};
  options.gather_again = gather_again;
  options.worker.spec.chunk_elements = 64;
  return options;
}

// A store of each of two ranks, with one thread, which body() gets.
void each_store(const Box& box, const std::string& name, const StoreOptions& options,
                const std::function<void(Store& store, StoreThread& mine, uint32_t rank)>& body) {
  each_rank(2, [&](uint32_t rank) {
    StoreOptions of_rank = options;
    JobSpec spec = options.worker.spec;
    spec.name = name;
    spec.world_size = 2;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    of_rank.worker = box.options(spec);
    of_rank.worker.rank = static_cast<int32_t>(rank);
    Store store(of_rank);
    StoreThread mine(store, 0);
    body(store, mine, rank);
  });
}

// Two clocks; each adds 1 to 100 rows of the rank from `first`, and reads them before.
void iterate(StoreThread& mine, uint32_t rank, uint64_t first, int32_t want) {
  for (int clock = 0; clock < 2; ++clock) {
    for (uint64_t row = first; row < first + 100; ++row) {
      const uint64_t of_rank = 2 * row + rank;
      if (!mine.is_virtual()) {
        EXPECT_EQ(mine.read<int32_t>(0, of_rank), want + clock);
      } else {
        mine.read<int32_t>(0, of_rank);
      }
      mine.update(0, of_rank, int32_t{1});
    }
    mine.clock();
  }
}

// A clock: adds 1 to rows of the rank, in another order than iterate().
void add_backwards(StoreThread& mine, uint32_t rank, uint64_t end) {
  for (uint64_t row = end; row-- > 0;) mine.update(0, 2 * row + rank, int32_t{1});
  mine.clock();
}

constexpr uint64_t kOfIteration = 400;  // accesses

// Only rank 1 has another pattern from iteration 4 on. After it half of all accesses were others:
// 5 is seen with its end, 6 recorded, and both ranks place rows with its last clock.
TEST(GatherAgain, OfOneRankIsThatOfAll) {
  Box box(2);
  each_store(box, "one", options_with(0.3, false),
             [](Store& store, StoreThread& mine, uint32_t rank) {
               mine.begin_virtual();
               iterate(mine, rank, 0, 0);
               mine.finish();
               for (int32_t i = 1; i <= 10; ++i) {
                 const bool changed = i >= 4 && rank == 1;
                 iterate(mine, rank, changed ? 200 : 0, 2 * (changed ? i - 4 : i - 1));
                 const StoreStats stats = store.stats();
                 EXPECT_EQ(stats.placed, i < 6 ? 1U : 2U) << "iteration " << i;
                 if (i >= 6) {
                   EXPECT_EQ(stats.in_sequence, (i - 6) * kOfIteration) << "iteration " << i;
                   EXPECT_EQ(stats.by_index + stats.dynamic, 0U);
                 } else if (changed) {
                   EXPECT_EQ(stats.dynamic, (i - 3) * kOfIteration);
                 }
               }
             });
}

// From a share of the accesses of all ranks on.
TEST(GatherAgain, ASmallerShareOrNoneDoesNot) {
  Box box(2);
  for (const double share : {0.0, 0.6}) {
    each_store(box, fmt::format("less{}", static_cast<int>(10 * share)), options_with(share, false),
               [](Store& store, StoreThread& mine, uint32_t rank) {
                 mine.begin_gathering();
                 iterate(mine, rank, 0, 0);
                 mine.finish();
                 for (int32_t i = 1; i <= 8; ++i) {
                   iterate(mine, rank, 200 * rank, 2 * (rank == 1 ? i - 1 : i));
                 }
                 EXPECT_EQ(store.stats().placed, 1U);
                 EXPECT_EQ(store.stats().dynamic, rank * 8 * kOfIteration);
               });
  }
}

// What was recorded of a table that is fixed comes as fast ever after.
TEST(GatherAgain, APromiseRemains) {
  Box box(2);
  each_store(box, "promise", options_with(0.5, true),
             [](Store& store, StoreThread& mine, uint32_t rank) {
               mine.begin_virtual();
               iterate(mine, rank, 0, 0);
               mine.finish();
               for (int clock = 0; clock < 8; ++clock) add_backwards(mine, rank, 50);
               EXPECT_EQ(store.stats().placed, 2U);
               EXPECT_EQ(store.stats().places, 50U);
               for (uint64_t row = 0; row < 100; ++row) {
                 EXPECT_EQ(mine.read<int32_t>(0, 2 * row + rank), row < 50 ? 8 : 0);
                 mine.update(0, 2 * row + rank, int32_t{1});
               }
               mine.clock();
               EXPECT_EQ(mine.read<int32_t>(0, 2 * 99 + rank), 1);
               EXPECT_EQ(store.stats().widened, 0U);
               mine.clock();
               EXPECT_EQ(mine.read<int32_t>(0, 2 * 100 + rank), 0);
               EXPECT_EQ(store.stats().widened, 1U);
             });
}

// An application that records while the store does so.
TEST(GatherAgain, TheApplicationsRecordingCounts) {
  Box box(2);
  each_store(box, "both", options_with(0.3, false),
             [](Store& store, StoreThread& mine, uint32_t rank) {
               mine.begin_virtual();
               iterate(mine, rank, 0, 0);
               mine.finish();
               iterate(mine, rank, 200, 0);
               iterate(mine, rank, 200, 2);  // the next is recorded, but for this
               mine.begin_gathering();
               iterate(mine, rank, 200, 4);
               mine.finish();
               for (int32_t i = 0; i < 6; ++i) iterate(mine, rank, 200, 6 + 2 * i);
               EXPECT_EQ(store.stats().placed, 2U);
               EXPECT_EQ(store.stats().in_sequence, 6 * kOfIteration);
             });
}

// One of more clocks than before, which the store would have recorded in part.
TEST(GatherAgain, TheApplicationsRecordingIsWhole) {
  Box box(2);
  for (const int iterations : {2, 3}) {
    each_store(box, fmt::format("whole{}", iterations), options_with(0.3, true),
               [iterations](Store& store, StoreThread& mine, uint32_t rank) {
                 mine.begin_virtual();
                 iterate(mine, rank, 0, 0);
                 mine.finish();
                 for (int clock = 0; clock < 4; ++clock) add_backwards(mine, rank, 100);
                 mine.begin_gathering();
                 for (int clock = 0; clock < 2 * iterations; ++clock) {
                   add_backwards(mine, rank, 100);
                 }
                 mine.finish();
                 EXPECT_EQ(store.stats().placed, 2U);
                 EXPECT_EQ(store.stats().places, 100U);
                 add_backwards(mine, rank, 100);
                 EXPECT_EQ(store.stats().in_sequence, 100U);
               });
  }
}

// Iterations that are all different are recorded ever more seldom; one that is as recorded ends
// that. A lost rank does, too.
TEST(GatherAgain, HasPatienceWithWhatAlwaysChanges) {
  constexpr Tally kOther{.ranks = 2, .accesses = 10, .outside = 10};
  constexpr Tally kSame{.ranks = 2, .accesses = 10, .outside = 0};
  PatternWatch watch(0.5, 2);
  const auto recorded_in = [&](int iterations, const Tally& tally) {
    std::vector<int> recorded;
    for (int i = 1; i <= iterations; ++i) {
      if (!watch.after_clock(i == 1 ? Tally() : tally)) continue;
      recorded.push_back(i);
      watch.placed(1);
    }
    return recorded;
  };
  EXPECT_TRUE(recorded_in(5, kOther).empty());  // nothing was recorded yet
  watch.placed(1);
  // After 1, 2, 4, 8 iterations; with each the one that is seen late, and the recorded one.
  EXPECT_EQ(recorded_in(28, kOther), (std::vector<int>{3, 7, 13, 23}));
  EXPECT_TRUE(recorded_in(5, kSame).empty());
  EXPECT_EQ(recorded_in(12, kOther).size(), 2U);
  watch.placed(1);
  EXPECT_TRUE(recorded_in(50, {.ranks = 1, .accesses = 10, .outside = 10}).empty());
  PatternWatch loses(0.5, 2);
  loses.placed(1);
  EXPECT_FALSE(loses.after_clock({}));
  EXPECT_FALSE(loses.after_clock(kOther));
  EXPECT_TRUE(loses.is_recording());
  EXPECT_FALSE(loses.after_clock({.ranks = 1, .accesses = 5, .outside = 5}));
  EXPECT_FALSE(loses.is_recording());
}

}  // namespace gather_again_test
}  // namespace phub::iterstore
