// The parts of a store that need no box: where rows are placed, what of it a rank exchanges, which
// core a thread has, and how threads meet.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "numa/topology.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "worker/iterstore/cores.h"
#include "worker/iterstore/meeting.h"
#include "worker/iterstore/row_plan.h"

namespace phub::iterstore {
namespace parts_test {

using phub::testing::expect_error;
using phub::testing::fresh_seeds;

constexpr uint32_t kChunk = 64;

std::vector<Table> tables_of(std::mt19937_64& random) {
  std::vector<TableSpec> specs(1 + random() % 3);
  for (size_t t = 0; t < specs.size(); ++t) {
    specs[t] = {.name = std::to_string(t),
                .rows = 1 + random() % 500,
                .columns = static_cast<uint32_t>(1 + random() % 90),
                .type = random() % 2 == 0 ? "i32" : "f64",
                .fixed = random() % 2 == 0};
  }
  return checked_tables(specs);
}

Use some_use(std::span<const Table> tables, std::mt19937_64& random) {
  std::vector<Recording> threads(1 + random() % 3);
  for (Recording& steps : threads) {
    steps.resize(random() % 300);
    for (Step& step : steps) {
      if (random() % 20 == 0) continue;
      step.access = random() % 2 == 0 ? Access::kRead : Access::kUpdate;
      step.table = static_cast<uint32_t>(random() % tables.size());
      step.row = random() % tables[step.table].rows;
    }
  }
  return use_of(threads, tables);
}

// What the ranks would tell each other.
AllUse all_of(std::span<const Use> ranks, std::span<const Table> tables) {
  AllUse all{.rows = {}, .sets = RankSets(static_cast<uint32_t>(ranks.size()))};
  for (size_t t = 0; t < tables.size(); ++t) {
    auto& rows = all.rows.emplace_back(tables[t].rows);
    for (size_t row = 0; row < rows.size(); ++row) {
      RankSets::Set set(all.sets.words());
      for (size_t r = 0; r < ranks.size(); ++r) {
        const RowUse& use = ranks[r].rows[t][row];
        if (use.accesses == 0) continue;
        rows[row].accesses += static_cast<int32_t>(use.accesses);
        rows[row].updating += use.updated ? 1 : 0;
        set[r / 64] |= uint64_t{1} << (r % 64);
        rows[row].owner = static_cast<int32_t>(r);
        rows[row].first_part = std::min(rows[row].first_part, use.first_part);
      }
      rows[row].ranks = all.sets.number_of(set);
    }
  }
  return all;
}

// The keys of narrow tables say of each chunk which ranks access some of its rows.
void expect_exchanged(const RowPlan& plan, std::span<const Table> tables,
                      std::span<const KeySpec> keys, std::span<const Use> ranks) {
  for (size_t k = 0; k < keys.size(); ++k) {
    const RowPlan::Key& key = plan.keys()[k];
    ASSERT_EQ(keys[k].exchanged_by.empty(), !plan.is_narrow(key.table));
    if (keys[k].exchanged_by.empty()) continue;
    ASSERT_EQ(keys[k].exchanged_by.back().end, keys[k].elements);
    std::map<uint64_t, RankSets::Set> of_chunks;
    for (uint64_t i = 0; i < keys[k].elements; ++i) {
      const uint64_t row = plan.row_at(key.table, key.first + i / tables[key.table].row_words());
      RankSets::Set& of = of_chunks[i / kChunk];
      of.resize((ranks.size() + 63) / 64);
      for (size_t r = 0; r < ranks.size(); ++r) {
        if (ranks[r].rows[key.table][row].accesses > 0) of[r / 64] |= uint64_t{1} << (r % 64);
      }
    }
    auto range = keys[k].exchanged_by.begin();
    for (const auto& [chunk, of] : of_chunks) {
      while (range->end <= chunk * kChunk) ++range;
      ASSERT_EQ(range->ranks, of);
    }
  }
}

// A narrow key's rows are of one machine's ranks, or none is.
void expect_keys_of_machines(const RowPlan& plan, const AllUse& all, const PlanSettings& settings) {
  const std::set<uint64_t> hosts(settings.rank_hosts.begin(), settings.rank_hosts.end());
  if (hosts.size() < 2) return;
  for (const RowPlan::Key& key : plan.keys()) {
    if (!plan.is_narrow(key.table)) continue;
    std::set<uint64_t> of_key;
    for (uint64_t i = 0; i < key.rows; ++i) {
      const RankSets::Set& ranks =
          all.sets[all.rows[key.table][plan.row_at(key.table, key.first + i)].ranks];
      std::set<uint64_t> of_row;
      for (size_t r = 0; r < settings.rank_hosts.size(); ++r) {
        if ((ranks[r / 64] >> (r % 64) & 1) != 0) of_row.insert(settings.rank_hosts[r]);
      }
      of_key.insert(of_row.size() == 1 ? *of_row.begin() : 0);
    }
    EXPECT_EQ(of_key.size(), 1u) << key.first;
  }
}

// What had a place has the same, and all else one behind; nothing is known of who exchanges it.
void expect_widened(RowPlan& plan, std::span<const Table> tables) {
  for (uint32_t t = 0; t < tables.size(); ++t) {
    const bool was = plan.is_narrow(t);
    std::vector<std::optional<RowPlace>> before;
    for (uint64_t row = 0; row < tables[t].rows; ++row) before.push_back(plan.place(t, row));
    if (was) plan.widen(t);
    ASSERT_FALSE(plan.is_narrow(t));
    std::set<std::pair<uint32_t, uint64_t>> taken;
    for (uint64_t row = 0; row < tables[t].rows; ++row) {
      const RowPlace place = plan.place(t, row).value();
      ASSERT_TRUE(taken.insert({place.key, place.row}).second);
      const RowPlan::Key& key = plan.keys()[place.key];
      ASSERT_EQ(plan.row_at(t, key.first + place.row), row);
      ASSERT_TRUE(key.exchanged_by.empty());
      if (!before[row]) continue;
      ASSERT_EQ(place.key, before[row]->key);
      ASSERT_EQ(place.row, before[row]->row);
    }
  }
  ASSERT_FALSE(plan.has_narrow());
}

// Every row has one place, every place one row; only rows of fixed tables that nobody accesses have
// none. A rank's interest has all chunks of the rows that it uses, and no others.
TEST(RowPlan, PlacesEveryRowOnce) {
  const auto seeds = fresh_seeds(phub::testing::scaled(100));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const std::vector<Table> tables = tables_of(random);
    std::vector<Use> ranks;
    const uint64_t most = random() % 5 == 0 ? 200 : 4;
    for (uint64_t r = 1 + random() % most; r > 0; --r) ranks.push_back(some_use(tables, random));
    const AllUse all = all_of(ranks, tables);
    const bool known = random() % 5 > 0;
    PlanSettings settings{.placement = random() % 3 > 0,
                          .narrow = random() % 3 > 0,
                          .batches = static_cast<uint32_t>(1 + random() % kParts),
                          .chunk_elements = kChunk};
    if (random() % 2 == 0) settings.rank_hosts.resize(ranks.size());
    for (uint64_t& host : settings.rank_hosts) host = random() % 3;
    RowPlan plan(tables, known ? &all : nullptr, settings);
    const std::vector<KeySpec> keys = key_specs(plan, tables);
    std::set<std::pair<uint32_t, uint64_t>> taken;
    for (uint32_t t = 0; t < tables.size(); ++t) {
      EXPECT_EQ(plan.is_narrow(t),
                known && settings.placement && settings.narrow && tables[t].fixed);
      for (uint64_t row = 0; row < tables[t].rows; ++row) {
        const auto place = plan.place(t, row);
        ASSERT_EQ(place.has_value(), !plan.is_narrow(t) || all.rows[t][row].owner >= 0) << seed;
        if (!place) continue;
        ASSERT_TRUE(taken.insert({place->key, place->row}).second) << seed;
        const RowPlan::Key& key = plan.keys()[place->key];
        ASSERT_EQ(key.table, t);
        ASSERT_LT(place->row, key.rows);
        ASSERT_EQ(plan.row_at(t, key.first + place->row), row) << seed;
      }
    }
    uint64_t rows = 0;
    for (const RowPlan::Key& key : plan.keys()) rows += key.rows;
    EXPECT_EQ(rows, taken.size()) << seed;
    EXPECT_TRUE(std::ranges::is_sorted(plan.keys(), {}, &RowPlan::Key::part)) << seed;
    for (const Use& use : ranks) {
      for (const KeyInterest& interest : interest_of(plan, tables, use, kChunk)) {
        const auto k = std::ranges::find(keys, interest.key, &KeySpec::name) - keys.begin();
        const RowPlan::Key& key = plan.keys()[static_cast<size_t>(k)];
        const uint64_t words = tables[key.table].row_words();
        check_ranges(interest, keys[static_cast<size_t>(k)]);
        for (uint64_t chunk = 0; chunk * kChunk < keys[static_cast<size_t>(k)].elements; ++chunk) {
          bool reads = false, writes = false;
          for (uint64_t row = 0; row < key.rows; ++row) {
            if (row * words >= (chunk + 1) * kChunk || (row + 1) * words <= chunk * kChunk)
              continue;
            const RowUse& of = use.rows[key.table][plan.row_at(key.table, key.first + row)];
            reads |= of.accesses > 0;
            writes |= of.updated;
          }
          const auto has = [chunk](const std::vector<ElementRange>& ranges) {
            return std::ranges::any_of(ranges, [chunk](const ElementRange& range) {
              return range.begin <= chunk * kChunk && chunk * kChunk < range.end;
            });
          };
          ASSERT_EQ(has(interest.reads), reads) << seed;
          ASSERT_EQ(has(interest.writes), writes) << seed;
        }
      }
    }
    expect_exchanged(plan, tables, keys, ranks);
    expect_keys_of_machines(plan, all, settings);
    expect_widened(plan, tables);
    if (HasFailure()) return;
  }
}

// Rows of the same ranks lie together: two ranks that share one row in ten have few chunks that
// both exchange.
TEST(RowPlan, ChunksHaveFewOwners) {
  const std::vector<TableSpec> specs = {{.name = "t", .rows = 6400, .fixed = true}};
  const std::vector<Table> tables = checked_tables(specs);
  std::vector<Recording> recordings(2);
  for (uint64_t row = 0; row < 6400; ++row) {
    for (uint32_t r = 0; r < 2; ++r) {
      if (row % 10 == 0 || row % 2 == r) {
        recordings[r].push_back({.access = Access::kUpdate, .table = 0, .row = row});
      }
    }
  }
  std::vector<Use> ranks;
  for (const Recording& recording : recordings) ranks.push_back(use_of({&recording, 1}, tables));
  const AllUse all = all_of(ranks, tables);
  const RowPlan plan(tables, &all, {.batches = 1, .chunk_elements = kChunk});
  uint64_t elements = 0;
  for (const Use& use : ranks) {
    for (const KeyInterest& interest : interest_of(plan, tables, use, kChunk)) {
      for (const ElementRange& range : interest.reads) elements += range.end - range.begin;
    }
  }
  EXPECT_LE(elements, 6400 + 640 + 4 * kChunk);  // what is shared counts twice
}

// Of a table that nobody recorded it is not known that few of its rows are updated.
TEST(RowPlan, KeysOfWhatIsRecordedAreSparse) {
  const std::vector<TableSpec> specs = {{.name = "read", .rows = 64},
                                        {.name = "not", .rows = 64},
                                        {.name = "some", .rows = 64},
                                        {.name = "all", .rows = 64}};
  const std::vector<Table> tables = checked_tables(specs);
  Recording recording = {{.access = Access::kRead, .table = 0, .row = 3},
                         {.access = Access::kUpdate, .table = 2, .row = 3}};
  for (uint64_t row = 0; row < 64; ++row) {
    recording.push_back({.access = Access::kUpdate, .table = 3, .row = row});
  }
  const std::vector<Use> ranks = {use_of({&recording, 1}, tables)};
  const AllUse all = all_of(ranks, tables);
  for (const bool placement : {false, true}) {
    for (const uint32_t sparse_ranks : {0, 1}) {
      const RowPlan plan(tables, &all,
                         {.placement = placement, .batches = 1, .sparse_ranks = sparse_ranks});
      std::array<std::set<bool>, 4> sparse;
      for (const RowPlan::Key& key : plan.keys()) sparse[key.table].insert(key.sparse);
      const std::set<bool> whole = {false}, rows = {true};
      EXPECT_EQ(sparse[0], sparse_ranks == 0 ? whole : rows);
      EXPECT_EQ(sparse[1], whole);
      EXPECT_TRUE(sparse[2].contains(true) == (sparse_ranks > 0));
      EXPECT_TRUE(sparse[3].contains(false));
    }
  }
}

TEST(Cores, ThreadsAreSpreadOverNodes) {
  const numa::Topology box = numa::from_synthetic("pack:2 core:8 pu:1");
  std::vector<uint32_t> nodes;
  for (uint32_t t = 0; t < 4; ++t) nodes.push_back(core_of(box, t, 4, 3, 0).node);
  EXPECT_EQ(nodes, (std::vector<uint32_t>{0, 0, 1, 1}));
  std::set<uint32_t> cpus;  // two ranks on one host
  for (uint32_t r = 4; r < 6; ++r) {
    for (uint32_t t = 0; t < 8; ++t) {
      const numa::Core& core = core_of(box, t, 8, r, 2);
      EXPECT_EQ(core.node, r - 4);
      cpus.insert(core.os_cpu);
    }
  }
  EXPECT_EQ(cpus.size(), 16U);
  for (uint32_t t = 0; t < 40; ++t)
    EXPECT_LT(core_of(box, t, 40, 0, 1).node, 2U);  // more than cores
}

TEST(Meeting, TheLastOneWorks) {
  Meeting meeting(4);
  std::atomic<int> here = 0, worked = 0;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      meeting.enter(t);
      for (int round = 1; round <= 100; ++round) {
        ++here;
        meeting.meet("clock", [&] {
          EXPECT_EQ(here, 4 * round);
          ++worked;
        });
        EXPECT_EQ(worked, round);
        meeting.meet("again", [] {});
      }
      meeting.leave(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(meeting.is_empty());
}

// Whether it goes before the other waits or, as mostly, while it does.
TEST(Meeting, NobodyWaitsForWhoIsGone) {
  for (int turn = 0; turn < 20; ++turn) {
    Meeting meeting(2);
    meeting.enter(0);
    meeting.enter(1);
    const auto comes = [&meeting] {
      expect_error(ErrorCode::kInvalid, "thread 1 of the store is gone",
                   [&] { meeting.meet("clock", [] {}); });
    };
    std::thread waits(comes);
    std::this_thread::sleep_for(std::chrono::milliseconds(turn % 4));
    meeting.leave(1);
    waits.join();
    comes();
  }
}

// Before the others have come at all.
TEST(Meeting, NobodyWaitsForWhoCameAndWent) {
  Meeting meeting(2);
  meeting.enter(0);
  meeting.leave(0);
  meeting.enter(1);
  expect_error(ErrorCode::kInvalid, "thread 0 of the store is gone",
               [&] { meeting.meet("clock", [] {}); });
}

TEST(Meeting, AllMayComeAgain) {
  Meeting meeting(2);
  for (int turn = 0; turn < 2; ++turn) {
    meeting.enter(0);
    std::thread other([&] {
      meeting.enter(1);
      meeting.meet("clock", [] {});
      meeting.leave(1);
    });
    meeting.meet("clock", [] {});
    other.join();
    meeting.leave(0);
  }
}

TEST(Meeting, AnErrorIsThatOfAll) {
  Meeting meeting(2);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      meeting.enter(t);
      for (int again = 0; again < 2; ++again) {
        expect_error(ErrorCode::kRankLost, "rank 3", [&] {
          meeting.meet("clock", [] { fail(ErrorCode::kRankLost, "rank 3 is lost"); });
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each of three pieces waits until all three threads are at one.
TEST(Meeting, ThreadsThatWaitTakePieces) {
  constexpr uint32_t kThreads = 3;
  constexpr size_t kPieces = 50;
  Meeting meeting(kThreads);
  std::atomic<uint32_t> at_one = 0;
  std::array<std::atomic<uint32_t>, kPieces> called = {};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      meeting.enter(t);
      meeting.meet("clock", [&] {
        meeting.share(kThreads, [&](size_t) {
          ++at_one;
          const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
          while (at_one < kThreads && std::chrono::steady_clock::now() < end) {
            std::this_thread::yield();
          }
          EXPECT_EQ(at_one, kThreads);
        });
      });
      for (uint32_t round = 1; round <= 100; ++round) {
        meeting.meet("clock", [&] {
          meeting.share(kPieces, [&](size_t piece) { ++called[piece]; });
          for (const auto& times : called) EXPECT_EQ(times, round);
          meeting.share(0, [](size_t) { FAIL(); });
        });
        for (const auto& times : called) EXPECT_GE(times, round);
      }
      meeting.leave(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whoever takes it.
TEST(Meeting, AnErrorOfAPieceIsThatOfAll) {
  for (size_t wrong = 0; wrong < 20; ++wrong) {
    Meeting meeting(2);
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        meeting.enter(t);
        expect_error(ErrorCode::kRankLost, "rank 3", [&] {
          meeting.meet("clock", [&] {
            meeting.share(20, [wrong](size_t piece) {
              if (piece == wrong) fail(ErrorCode::kRankLost, "rank 3 is lost");
            });
            ADD_FAILURE() << "goes on after an error";
          });
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(Tables, AreChecked) {
  const auto refuses = [](const std::string& words, std::vector<TableSpec> specs) {
    expect_error(ErrorCode::kInvalid, words, [&] { checked_tables(specs); });
  };
  refuses("a store has 1 to", {});
  refuses("its name", {{.name = "", .rows = 1}});
  refuses("there is no operation 'or' of values of type 'f32'",
          {{.name = "a", .rows = 1, .operation = "or"}});
  refuses("there must be some", {{.name = "a", .rows = 0}});
  refuses("there must be some", {{.name = "a", .rows = 1, .columns = 0}});
  refuses("at most", {{.name = "a", .rows = uint64_t{1} << 40, .columns = 2}});
  refuses("twice", {{.name = "a", .rows = 1}, {.name = "a", .rows = 2}});
}

}  // namespace parts_test
}  // namespace phub::iterstore
