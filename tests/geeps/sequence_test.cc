#include "worker/geeps/sequence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/worker/expect_error.h"

namespace phub::geeps {
namespace sequence_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Keys = std::vector<uint64_t>;

template <class Call>
std::string error_of(Call call) {
  return phub::testing::error_of(ErrorCode::kInvalid, call);
}

const std::vector<TableInfo> kTables = {
    {"w0", 128}, {"w1", 100}, {"x0", 64, true}, {"x1", 64, true}};

// Algorithm 1 with two layers.
Sequence two_layers() {
  Recorder recorder(kTables);
  const std::vector<Keys> weights = {{10, 11, 12}, {7}};
  const std::vector<Keys> values = {{1, 2}, {3, 4, 5}};
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const uint32_t w = recorder.read(layer, weights[layer]);
    const uint32_t x = recorder.local_access(2 + layer, values[layer], false);
    recorder.post_read(w);
    recorder.post_local_access(x);
  }
  for (uint32_t layer = 2; layer-- > 0;) {
    const uint32_t w = recorder.read(layer, weights[layer]);
    const uint32_t g = recorder.pre_update(layer, weights[layer]);
    const uint32_t x = recorder.local_access(2 + layer, values[layer]);
    recorder.post_read(w);
    recorder.update(g);
    recorder.post_local_access(x, false);
    recorder.table_clock(layer);
  }
  return recorder.finish();
}

TEST(Sequence, RecordsTheStepsOfAnIteration) {
  const Sequence sequence = two_layers();
  EXPECT_EQ(sequence.operations.size(), 2u * 4 + 2 * 7);
  EXPECT_EQ(sequence.lists.size(), 4u) << "each list once";
  EXPECT_EQ(sequence.operations[1],
            (Operation{.call = Call::kLocalAccess, .table = 2, .list = 1, .moves = false}));
  EXPECT_EQ(sequence.operations[2],
            (Operation{.call = Call::kPostRead, .table = 0, .acquired = 0}));
  EXPECT_EQ(sequence.operations.back(), (Operation{.call = Call::kTableClock, .table = 0}));
}

TEST(Sequence, DemandsWhatAlgorithmOneNeeds) {
  const auto [demand, entries] = demand_of(two_layers());
  EXPECT_EQ(demand.phases, 4u);
  ASSERT_EQ(demand.entries.size(), 4u);
  EXPECT_EQ(entries[0], (KeyList{0, {10, 11, 12}}));
  EXPECT_EQ(demand.entries[0].bytes, 3u * 128 * 4);
  EXPECT_EQ(demand.entries[0].log_bytes, 3u * 128 * 4);
  EXPECT_EQ(demand.entries[2].bytes, 1u * 100 * 4);
  EXPECT_TRUE(demand.entries[1].local);
  EXPECT_EQ(demand.entries[1].log_bytes, 0u);
  EXPECT_TRUE(demand.batches[1].in_place);
  EXPECT_FALSE(demand.batches[0].in_place);
  std::vector<uint32_t> phases;
  for (const Access& access : demand.accesses) {
    phases.push_back(access.first_phase);
    EXPECT_EQ(access.first_phase, access.last_phase);
  }
  EXPECT_THAT(phases, ElementsAre(0, 0, 1, 1, 2, 2, 2, 3, 3, 3));
  EXPECT_FALSE(demand.accesses[1].fetch);
  EXPECT_TRUE(demand.accesses[1].save);
  EXPECT_TRUE(demand.accesses[6].fetch);
  EXPECT_FALSE(demand.accesses[6].save);
  const Placement placement = place(demand, {.budget_bytes = 1 << 20});
  EXPECT_EQ(placement.moved_bytes, 0u);
}

TEST(Sequence, ABufferThatIsKeptIsLiveInAllPhasesUntilItsRelease) {
  Recorder recorder(kTables);
  const uint32_t kept = recorder.read(0, Keys{1});
  const uint32_t first = recorder.local_access(2, Keys{1});
  recorder.post_local_access(first);
  const uint32_t second = recorder.local_access(3, Keys{1});
  recorder.post_local_access(second);
  recorder.post_read(kept);
  const Demand demand = demand_of(recorder.finish()).demand;
  EXPECT_EQ(demand.phases, 2u);
  EXPECT_EQ(demand.accesses[0].last_phase, 1u);
  EXPECT_EQ(demand.accesses[1].last_phase, 0u);
}

// Once given back, until the table is clocked, and by one read only.
TEST(Sequence, AReadOfTheSameRowsInTheSameClockIsKnown) {
  const auto again_of = [](const std::function<void(Recorder&)>& calls) {
    Recorder recorder(kTables);
    calls(recorder);
    std::vector<int> again;
    for (const Access& access : demand_of(recorder.finish()).demand.accesses) {
      again.push_back(access.again ? static_cast<int>(*access.again) : -1);
    }
    return again;
  };
  const Keys all = {1, 2, 3}, some = {2, 1};
  const auto read = [](Recorder& r, uint32_t table, const Keys& keys) {
    r.post_read(r.read(table, keys));
  };
  EXPECT_THAT(again_of([&](Recorder& r) {
                read(r, 0, all);
                read(r, 0, some);
                r.table_clock(1);
                r.update(r.pre_update(0, all));
                read(r, 0, all);
                read(r, 0, all);
                r.table_clock(0);
                read(r, 0, all);
                read(r, 1, all);
              }),
              ElementsAre(-1, -1, -1, 0, 3, -1, -1));
  EXPECT_THAT(again_of([&](Recorder& r) {
                const uint32_t first = r.read(0, all);
                const uint32_t second = r.read(0, all);  // the first is in use
                r.post_read(first);
                const uint32_t third = r.read(0, all);
                const uint32_t fourth = r.read(0, all);  // the third has taken it
                r.post_read(second);
                r.post_read(third);
                r.post_read(fourth);
                r.post_local_access(r.local_access(2, all));
                r.post_local_access(r.local_access(2, all));
              }),
              ElementsAre(-1, -1, 0, -1, -1, -1));
}

TEST(Sequence, ListsThatOverlapShareTheirCommonRows) {
  Recorder recorder(kTables);
  recorder.post_read(recorder.read(0, Keys{1, 2, 3, 4}));
  recorder.post_read(recorder.read(0, Keys{4, 9, 3}));
  recorder.post_local_access(recorder.local_access(2, Keys{1, 2}));
  recorder.post_local_access(recorder.local_access(2, Keys{2, 1}));
  const auto [demand, entries] = demand_of(recorder.finish());
  EXPECT_THAT(entries, ElementsAre(KeyList{0, {1, 2}}, KeyList{0, {3, 4}}, KeyList{0, {9}},
                                   KeyList{2, {1, 2}}));
  EXPECT_EQ(demand.batches[0].parts.size(), 2u);
  EXPECT_EQ(demand.batches[1].parts.size(), 2u);
  EXPECT_TRUE(demand.batches[2].in_place);
  EXPECT_FALSE(demand.batches[3].in_place) << "another order: it needs a copy";
}

// Every row of a list is in exactly one part of its batch, and rows of an entry are always
// together.
TEST(Sequence, RandomListsAreCutIntoEntries) {
  std::mt19937 engine(5);
  for (int round = 0; round < 300; ++round) {
    Recorder recorder(kTables);
    const size_t reads = 1 + engine() % 8;
    for (size_t i = 0; i < reads; ++i) {
      Keys keys;
      for (uint64_t key = 0; key < 12; ++key) {
        if (engine() % 3 == 0) keys.push_back(key * 1000);
      }
      if (keys.empty()) keys.push_back(5);
      std::shuffle(keys.begin(), keys.end(), engine);
      recorder.post_read(recorder.read(engine() % 2, keys));
    }
    const Sequence sequence = recorder.finish();
    const auto [demand, entries] = demand_of(sequence);
    std::set<std::pair<uint32_t, uint64_t>> seen;
    for (const KeyList& entry : entries) {
      for (const uint64_t key : entry.keys) ASSERT_TRUE(seen.emplace(entry.table, key).second);
    }
    for (size_t i = 0; i < sequence.lists.size(); ++i) {
      Keys rows;
      for (const BatchPart& part : demand.batches[i].parts) {
        ASSERT_EQ(entries[part.entry].table, sequence.lists[i].table);
        ASSERT_EQ(part.rows, entries[part.entry].keys.size());
        rows.insert(rows.end(), entries[part.entry].keys.begin(), entries[part.entry].keys.end());
      }
      Keys keys = sequence.lists[i].keys;
      std::sort(keys.begin(), keys.end());
      std::sort(rows.begin(), rows.end());
      ASSERT_EQ(rows, keys);
    }
    place(demand, {.budget_bytes = 1 << 20});  // takes it
  }
}

TEST(Sequence, WrongCallsAreNamedAndRecordNothing) {
  Recorder recorder(kTables);
  const uint32_t read = recorder.read(0, Keys{1});
  EXPECT_THAT(error_of([&] { recorder.update(read); }), HasSubstr("step 1: Update of step 0"));
  EXPECT_THAT(error_of([&] { recorder.post_read(7); }), HasSubstr("PostRead of step 7"));
  EXPECT_THAT(error_of([&] { recorder.read(9, Keys{1}); }), HasSubstr("table 9, of 4"));
  EXPECT_THAT(error_of([&] { recorder.read(2, Keys{1}); }), HasSubstr("which holds local data"));
  EXPECT_THAT(error_of([&] { recorder.local_access(0, Keys{1}); }),
              HasSubstr("which holds parameters"));
  EXPECT_THAT(error_of([&] { recorder.table_clock(2); }), HasSubstr("TableClock of 'x0'"));
  EXPECT_THAT(error_of([&] { recorder.read(0, {}); }), HasSubstr("no rows of 'w0'"));
  EXPECT_THAT(error_of([&] { recorder.read(0, Keys{4, 5, 4}); }), HasSubstr("row 4 of 'w0' twice"));
  EXPECT_THAT(error_of([&] { (void)recorder.finish(); }),
              HasSubstr("step 0: the buffer of Read of 'w0' is not given back with PostRead"));
  recorder.post_read(read);
  EXPECT_THAT(error_of([&] { recorder.post_read(read); }), HasSubstr("step 0 back again"));
  EXPECT_THAT(error_of([&] { recorder.post_read(1); }), HasSubstr("no such buffer"));
  recorder.table_clock(0);
  EXPECT_THAT(error_of([&] { recorder.table_clock(0); }), HasSubstr("second time"));
  EXPECT_EQ(recorder.finish().operations.size(), 3u);
  EXPECT_THAT(error_of([] { Recorder({{"empty", 0}}); }), HasSubstr("'empty' has empty rows"));
}

TEST(Sequence, NothingIsRecordedAsNothing) {
  const Sequence sequence = Recorder(kTables).finish();
  EXPECT_TRUE(sequence.operations.empty());
  EXPECT_TRUE(demand_of(sequence).demand.accesses.empty());
}

}  // namespace sequence_test
}  // namespace phub::geeps
