// Rows that are added and deleted while a job runs: every rank reads what a map of rows holds.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {
namespace changing_rows_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::expect_error;
using phub::testing::fresh_seeds;

constexpr uint64_t kRows = 20, kSpare = 12;
constexpr uint32_t kRanks = 3, kThreads = 2;
constexpr uint32_t kClocks = 24, kBetweenChanges = 3;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();

using Row = std::pair<uint32_t, uint64_t>;  // of a table
struct Change {
  uint32_t asker = 0;
  bool adds = false;
  Row row;
};
// Of a clock.
struct Turn {
  std::map<Row, int64_t> state;                               // of the rows that there are
  std::vector<std::vector<std::pair<Row, int64_t>>> updates;  // by asker
  std::vector<Change> changes;
};

Turn turn_of(const std::map<Row, int64_t>& state, std::mt19937_64& random) {
  Turn turn{.state = state, .updates = {}, .changes = {}};
  std::vector<Row> rows;
  for (const auto& [row, value] : state) rows.push_back(row);
  turn.updates.resize(kRanks * kThreads);
  for (auto& updates : turn.updates) {
    for (uint64_t u = random() % 30; u > 0; --u) {
      updates.emplace_back(rows[random() % rows.size()], random() % 1000);
    }
  }
  return turn;
}

// Deletes some rows, and adds others, now and then several ranks the same one.
void add_changes(Turn& turn, std::mt19937_64& random) {
  std::array<uint64_t, 2> places{kRows + kSpare, kRows + kSpare};
  for (const auto& [row, value] : turn.state) --places[row.first];
  const auto ask = [&](bool adds, Row row) {
    const auto asker = static_cast<uint32_t>(random() % (kRanks * kThreads));
    turn.changes.push_back({asker, adds, row});
    if (random() % 3 == 0) turn.changes.push_back({(asker + 1) % (kRanks * kThreads), adds, row});
  };
  for (const auto& [row, value] : turn.state) {
    if (random() % 6 == 0 && row.second != 0) ask(false, row);
  }
  for (uint32_t table = 0; table < 2; ++table) {
    std::map<uint64_t, bool> added;
    while (added.size() < places[table] && random() % 5 > 0) {
      const uint64_t number = random() % 2 == 0 ? random() % 60 : random() - 1;
      if (turn.state.contains({table, number}) || !added.emplace(number, true).second) continue;
      ask(true, {table, number});
    }
  }
}

std::vector<Turn> some_turns(std::mt19937_64& random) {
  std::map<Row, int64_t> state;
  for (uint64_t row = 0; row < kRows; ++row) {
    state[{0, row}] = 0;
    state[{1, row}] = kLowest;
  }
  std::vector<Turn> turns;
  for (uint32_t c = 0; c < kClocks; ++c) {
    Turn& turn = turns.emplace_back(turn_of(state, random));
    if (c % kBetweenChanges == 0) add_changes(turn, random);
    for (const auto& updates : turn.updates) {
      for (const auto& [row, by] : updates) {
        state[row] = row.first == 0 ? state[row] + by : std::max(state[row], by);
      }
    }
    // The clock between is left out: where rows are placed with it, changes come with it.
    for (const Change& change : turn.changes) {
      if (!change.adds) state.erase(change.row);
    }
    if (c % kBetweenChanges != 1) continue;  // the second clock behind the calls
    for (const Change& change : turns[c - 1].changes) {
      if (change.adds) state.emplace(change.row, change.row.first == 0 ? 0 : kLowest);
    }
  }
  turns.push_back({.state = state, .updates = {}, .changes = {}});
  return turns;
}

void make_calls(StoreThread& mine, const Turn& turn, uint32_t asker, uint64_t seed) {
  for (const auto& [row, by] : turn.updates[asker]) mine.update(row.first, row.second, by);
  for (const auto& [row, value] : turn.state) {
    int64_t want = value;
    for (const auto& [of, by] : turn.updates[asker]) {
      if (of == row) want = row.first == 0 ? want + by : std::max(want, by);
    }
    ASSERT_TRUE(mine.has_row(row.first, row.second));
    const auto got = mine.read<int64_t>(row.first, row.second);
    if (!mine.is_virtual()) {
      ASSERT_EQ(got, want) << "seed " << seed << ", row " << row.second;
    }
  }
}

void run_thread(Store& store, const std::vector<Turn>& turns, uint32_t rank, uint32_t thread,
                uint64_t seed) {
  StoreThread mine(store, thread);
  const uint32_t asker = rank * kThreads + thread;
  for (uint32_t c = 0; c < kClocks; ++c) {
    if (c == 4 || c == 14) {  // at 4 changes are under way
      mine.begin_virtual();
      make_calls(mine, turns[c], asker, seed);
      mine.clock();
      mine.finish();
    }
    make_calls(mine, turns[c], asker, seed);
    for (uint64_t row = 0; row < 60 && c % kBetweenChanges != 1; ++row) {
      EXPECT_EQ(mine.has_row(1, row), turns[c].state.contains({1, row}));
    }
    for (const Change& change : turns[c].changes) {
      if (change.asker != asker) continue;
      const auto& [table, row] = change.row;
      change.adds ? mine.add_row(table, row) : mine.delete_row(table, row);
    }
    mine.clock();
  }
}

// After the last clock, by place.
void expect_table(Store& store, uint32_t table, const Turn& last) {
  const std::vector<std::byte> got = store.table(table);
  const std::vector<uint64_t> rows = store.rows(table);
  ASSERT_EQ(rows.size(), kRows + kSpare);
  size_t there = 0;
  for (size_t place = 0; place < rows.size(); ++place) {
    int64_t value = 0;
    std::memcpy(&value, got.data() + place * sizeof value, sizeof value);
    if (rows[place] == kNoRow) {
      EXPECT_EQ(value, table == 0 ? 0 : kLowest);
      continue;
    }
    const auto row = last.state.find({table, rows[place]});
    ASSERT_NE(row, last.state.end()) << "row " << rows[place];
    EXPECT_EQ(value, row->second) << "row " << rows[place];
    ++there;
  }
  EXPECT_EQ(there, std::ranges::count_if(
                       last.state, [table](const auto& row) { return row.first.first == table; }));
}

StoreOptions options_of(const Box& box, const std::string& name, uint32_t rank, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.chunk_elements = 64;
  StoreOptions options;
  options.worker = box.options(spec);
  options.worker.rank = static_cast<int32_t>(rank);
  options.tables = {
      {.name = "sums", .rows = kRows, .type = "i64", .spare = kSpare},
      {.name = "most", .rows = kRows, .type = "i64", .operation = "max", .spare = kSpare}};
  return options;
}

TEST(ChangingRows, AreThoseOfAMap) {
  const auto seeds = fresh_seeds(phub::testing::scaled(10));
  Box box(2);
  for (uint64_t seed = seeds.first; seed < seeds.end() && !HasFailure(); ++seed) {
    std::mt19937_64 random(seed);
    const std::vector<Turn> turns = some_turns(random);
    const double again = random() % 2 == 0 ? 0.3 : 0;
    const bool early = random() % 2 == 0;
    each_rank(kRanks, [&](uint32_t rank) {
      StoreOptions options = options_of(box, fmt::format("map{}", seed), rank, kRanks);
      options.threads = kThreads;
      options.gather_again = again;
      options.push_early = early;
      Store store(options);
      each_rank(kThreads, [&](uint32_t t) { run_thread(store, turns, rank, t, seed); });
      for (uint32_t table = 0; table < 2; ++table) expect_table(store, table, turns.back());
    });
  }
}

TEST(ChangingRows, WrongCallsAreRefused) {
  Box box(2);
  const auto refuses = [](const std::string& words, const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalid, words, call);
  };
  StoreOptions options = options_of(box, "wrong", 0, 1);
  options.tables[0].spare = 1;
  options.tables[1].spare = 0;
  Store store(options);
  StoreThread mine(store, 0);
  refuses("has already row 3", [&] { mine.add_row(0, 3); });
  refuses("has no row 99", [&] { mine.delete_row(0, 99); });
  refuses("have spare rows", [&] { mine.add_row(1, 99); });
  refuses("have spare rows", [&] { mine.add_row(0, kNoRow); });
  refuses("no table 2", [&] { mine.has_row(2, 0); });
  mine.add_row(0, 99);
  refuses("twice in a clock", [&] { mine.add_row(0, 99); });
  refuses("no spare row left for row 98", [&] { mine.add_row(0, 98); });
  mine.delete_row(0, 4);
  mine.add_row(0, 98);  // in the place of 4
  mine.clock();
  refuses("has no row 99", [&] { mine.read<int64_t>(0, 99); });
  mine.clock();
  EXPECT_EQ(mine.read<int64_t>(0, 99) + mine.read<int64_t>(0, 98), 0);
  refuses("has no row 4", [&] { mine.update(0, 4, int64_t{1}); });
  StoreOptions async = options_of(box, "async", 0, 1);
  async.worker.spec.consistency = "async";
  refuses("are for lock-step", [&] { Store refused(async); });
  options.tables[0].fixed = true;
  refuses("cannot be fixed", [&] { Store refused(options); });
}

// Two ranks that together ask for more than there is are told so, both.
TEST(ChangingRows, TooManyAreTheErrorOfAll) {
  Box box(2);
  each_rank(2, [&](uint32_t rank) {
    StoreOptions options = options_of(box, "many", rank, 2);
    options.tables[0].spare = 1;
    Store store(options);
    StoreThread mine(store, 0);
    mine.add_row(0, 100 + rank);
    mine.clock();
    expect_error(ErrorCode::kInvalid, "no spare row left for row 101", [&] { mine.clock(); });
  });
}

}  // namespace changing_rows_test
}  // namespace phub::iterstore
