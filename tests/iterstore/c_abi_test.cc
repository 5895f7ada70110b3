// The stores of phub.h: with them threads read what one thread computes over flat arrays
// (programs.cc), and every wrong call is an error.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/iterstore/programs.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "worker/phub.h"

namespace phub {
namespace c_abi_test {

using iterstore::TableSpec;
using testing::Box;
using testing::Call;
using testing::Calls;
using testing::each_rank;
using testing::Words;

void expect_ok(phub_code code) { ASSERT_EQ(code, PHUB_OK) << phub_last_error(); }

void expect_refused(phub_code got, phub_code want, const std::string& words) {
  EXPECT_EQ(got, want) << phub_last_error();
  EXPECT_THAT(phub_last_error(), ::testing::HasSubstr(words));
}

// Options of a worker and of a store, destroyed at the end.
struct Given {
  Given(const Box& box, const std::string& job, int64_t rank, int64_t ranks) {
    expect_ok(phub_options_from_environment(&worker));
    expect_ok(phub_options_set(worker, "server", box.address().c_str()));
    expect_ok(phub_options_set(worker, "job", job.c_str()));
    expect_ok(phub_options_set_number(worker, "rank", rank));
    expect_ok(phub_options_set_number(worker, "world_size", ranks));
    expect_ok(phub_options_set_number(worker, "chunk_elements", 64));
    expect_ok(phub_store_options_create(&store));
  }
  ~Given() {
    expect_ok(phub_store_options_destroy(store));
    expect_ok(phub_options_destroy(worker));
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  void set(const char* name, const std::string& value) const {
    expect_ok(phub_store_options_set(store, name, value.c_str()));
  }
  void add(const TableSpec& table) const {
    expect_ok(phub_store_options_add_table(store, table.name.c_str(), table.rows, table.columns,
                                           table.type.c_str(), table.operation.c_str(),
                                           table.fixed ? 1 : 0, table.spare));
  }
  phub_store* made() const {
    phub_store* store_of = nullptr;
    expect_ok(phub_store_create(worker, store, &store_of));
    return store_of;
  }

  phub_options* worker = nullptr;
  phub_store_options* store = nullptr;
};

phub_store_thread* thread_of(phub_store* store, uint32_t number) {
  phub_store_thread* mine = nullptr;
  expect_ok(phub_store_thread_create(store, number, &mine));
  return mine;
}

phub_store_counters counters_of(const phub_store* store) {
  phub_store_counters counters = {};
  counters.size = sizeof counters;
  expect_ok(phub_store_stats(store, &counters));
  return counters;
}

// ---- What is read, at random.

// Makes the calls, as many as can be in one. Returns what reads return.
std::vector<Words> run(phub_store_thread* mine, const std::vector<TableSpec>& tables,
                       const Calls& calls) {
  std::vector<Words> read;
  for (size_t first = 0, end = 0; first < calls.size(); first = end) {
    const Call& call = calls[first];
    const TableSpec& table = tables[call.table];
    std::vector<uint64_t> rows;
    Words words;
    for (end = first; end < calls.size(); ++end) {
      if (calls[end].table != call.table || calls[end].update != call.update) break;
      rows.push_back(calls[end].row);
      if (!call.update) continue;
      const Words by = testing::values(table, calls[end].seed);
      words.insert(words.end(), by.begin(), by.end());
    }
    const uint32_t width = testing::words_of(table);
    words.resize(rows.size() * width);
    if (call.update) {
      expect_ok(phub_store_update(mine, call.table, rows.data(), rows.size(), table.type.c_str(),
                                  words.data(), words.size() * 4));
      continue;
    }
    expect_ok(phub_store_read(mine, call.table, rows.data(), rows.size(), table.type.c_str(),
                              words.data(), words.size() * 4));
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto begin = words.begin() + static_cast<ptrdiff_t>(r * width);
      read.emplace_back(begin, begin + width);
    }
  }
  return read;
}

struct Program {
  uint32_t ranks = 1, threads = 1;
  std::vector<TableSpec> tables;
  // By rank and thread; the first is recorded, in a virtual iteration, a real one, or not at all.
  std::vector<std::vector<std::vector<Calls>>> clocks;
  std::string gather;
  std::vector<std::pair<const char*, std::string>> settings;
};

Program some_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  Program program;
  program.ranks = static_cast<uint32_t>(1 + random() % 3);
  program.threads = static_cast<uint32_t>(1 + random() % 3);
  program.tables = testing::some_tables(random);
  if (program.tables.empty()) program.tables = {{.name = "only", .rows = 10}};
  program.gather = std::array{"virtual", "real", "never"}[random() % 3];
  for (const char* flag : {"placement", "numa", "static_index"}) {
    program.settings.emplace_back(flag, random() % 4 ? "1" : "0");
  }
  const bool indexed = program.settings.back().second == "1";
  program.settings.emplace_back("push_early", indexed && random() % 2 == 0 ? "1" : "0");
  program.settings.emplace_back("threads", std::to_string(program.threads));
  program.settings.emplace_back("batches", std::to_string(1 + random() % 10));
  const uint32_t shares = program.ranks * program.threads;
  program.clocks.resize(program.ranks);
  for (uint32_t share = 0; share < shares; ++share) {
    std::vector<Calls> clocks{testing::some_calls(program.tables, share, shares, random)};
    for (int more = 0; more < 4; ++more) {
      clocks.push_back(testing::like(clocks[0], program.tables, true, random));
    }
    program.clocks[share / program.threads].push_back(clocks);
  }
  return program;
}

// What reads return in the end of all, by rank, thread and clock.
using Seen = std::vector<std::vector<std::vector<std::vector<Words>>>>;

Seen alone(const Program& program, testing::Oracle& oracle) {
  Seen seen(program.ranks);
  for (auto& of_rank : seen) of_rank.resize(program.threads);
  for (size_t c = 0; c < program.clocks[0][0].size(); ++c) {
    for (uint32_t r = 0; r < program.ranks; ++r) {
      for (uint32_t t = 0; t < program.threads; ++t) {
        seen[r][t].push_back(oracle.run(r, t, program.clocks[r][t][c]));
      }
    }
    oracle.clock();
  }
  return seen;
}

void run_thread(phub_store* store, const Program& program, uint32_t rank, uint32_t number,
                const Seen& want) {
  phub_store_thread* mine = thread_of(store, number);
  const std::vector<Calls>& clocks = program.clocks[rank][number];
  int is_virtual = -1;
  if (program.gather == "virtual") {
    expect_ok(phub_store_begin_virtual(mine));
    expect_ok(phub_store_is_virtual(mine, &is_virtual));
    EXPECT_EQ(is_virtual, 1);
    for (const Words& read : run(mine, program.tables, clocks[0])) {
      EXPECT_THAT(read, ::testing::Each(0U)) << "it was left as it was";
    }
    expect_ok(phub_store_clock(mine));
    expect_ok(phub_store_finish(mine));
  }
  if (program.gather == "real") expect_ok(phub_store_begin_gathering(mine));
  for (size_t c = 0; c < clocks.size(); ++c) {
    EXPECT_EQ(run(mine, program.tables, clocks[c]), want[rank][number][c])
        << "rank " << rank << ", thread " << number << ", clock " << c;
    expect_ok(phub_store_clock(mine));
    if (program.gather == "real" && c == 0) expect_ok(phub_store_finish(mine));
  }
  expect_ok(phub_store_is_virtual(mine, &is_virtual));
  EXPECT_EQ(is_virtual, 0);
  expect_ok(phub_store_thread_destroy(mine));
}

TEST(StoreInC, ReadsWhatOneThreadComputes) {
  const auto seeds = testing::fresh_seeds(testing::scaled(10));
  const Box box(2);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const Program program = some_program(seed);
    testing::Oracle oracle(program.tables);
    const Seen want = alone(program, oracle);
    each_rank(program.ranks, [&](uint32_t rank) {
      const Given given(box, fmt::format("c{}", seed), rank, program.ranks);
      for (const auto& [name, value] : program.settings) given.set(name, value);
      for (const TableSpec& table : program.tables) given.add(table);
      phub_store* store = given.made();
      uint32_t which = 99, ranks = 99;
      expect_ok(phub_store_rank(store, &which, &ranks));
      EXPECT_EQ(std::pair(which, ranks), std::pair(rank, program.ranks));
      each_rank(program.threads,
                [&](uint32_t number) { run_thread(store, program, rank, number, want); });
      for (uint32_t table = 0; table < program.tables.size(); ++table) {
        Words got(oracle.table(table).size());
        expect_ok(phub_store_table(store, table, got.data(), got.size() * 4));
        EXPECT_EQ(got, oracle.table(table)) << program.tables[table].name;
      }
      expect_ok(phub_store_destroy(store));
    });
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// ---- The rest of the interface, each for itself.

constexpr std::array<uint64_t, 3> kSome = {5, 0, 3};

// Adds `by` to some rows of table 0, of i64, and clocks.
void add_to_some(phub_store_thread* mine, int64_t by) {
  const std::array<int64_t, kSome.size()> all = {by, by, by};
  expect_ok(phub_store_update(mine, 0, kSome.data(), kSome.size(), "i64", all.data(), sizeof all));
  expect_ok(phub_store_clock(mine));
}

std::vector<int64_t> some_of(phub_store_thread* mine) {
  std::vector<int64_t> read(kSome.size(), -1);
  expect_ok(phub_store_read(mine, 0, kSome.data(), kSome.size(), "i64", read.data(),
                            read.size() * sizeof read[0]));
  return read;
}

// A store of one rank and thread.
struct Single {
  explicit Single(
      const Box& box, const std::string& job, const TableSpec& table,
      const std::function<void(const Given&)>& more = [](const Given&) {}) {
    const Given given(box, job, 0, 1);
    given.add(table);
    more(given);
    store = given.made();
    mine = thread_of(store, 0);
  }
  ~Single() {
    expect_ok(phub_store_thread_destroy(mine));
    expect_ok(phub_store_destroy(store));
  }
  Single(const Single&) = delete;
  Single& operator=(const Single&) = delete;

  phub_store* store = nullptr;
  phub_store_thread* mine = nullptr;
};

const TableSpec kNumbers = {.name = "numbers", .rows = 6, .type = "i64"};

TEST(StoreInC, CountsWhatItDoes) {
  const Box box(2);
  const Single one(box, "counts", kNumbers);
  expect_ok(phub_store_begin_virtual(one.mine));
  some_of(one.mine);
  add_to_some(one.mine, 1);
  expect_ok(phub_store_finish(one.mine));
  for (int clock = 0; clock < 4; ++clock) {
    some_of(one.mine);
    add_to_some(one.mine, 1);
  }
  const phub_store_counters counters = counters_of(one.store);
  EXPECT_EQ(counters.in_sequence, 4U * 2 * kSome.size());
  EXPECT_EQ(counters.by_index + counters.dynamic, 0U);
  EXPECT_EQ(counters.places, kSome.size());
  EXPECT_EQ(counters.clocks, 4U);
  uint64_t clocks = 0;
  expect_ok(phub_store_clocks(one.store, &clocks));
  EXPECT_EQ(clocks, 4U);
  EXPECT_EQ(counters.placed, 1U);
  EXPECT_EQ(counters.widened, 0U);
  EXPECT_GE(counters.pushes, 4U);
  EXPECT_GE(counters.chunks_pushed, 4U);
  // A program that was compiled with a shorter struct.
  phub_store_counters shorter = {};
  shorter.size = offsetof(phub_store_counters, by_index);
  shorter.by_index = 77;
  expect_ok(phub_store_stats(one.store, &shorter));
  EXPECT_EQ(shorter.in_sequence, counters.in_sequence);
  EXPECT_EQ(shorter.by_index, 77U);
}

// What a store with these options counts after a recorded iteration.
phub_store_counters counted_with(const Box& box,
                                 const std::vector<std::pair<const char*, const char*>>& settings) {
  const Single one(box, "counted", kNumbers, [&](const Given& given) {
    for (const auto& [name, value] : settings) given.set(name, value);
  });
  expect_ok(phub_store_begin_gathering(one.mine));
  add_to_some(one.mine, 1);
  expect_ok(phub_store_finish(one.mine));
  add_to_some(one.mine, 1);
  EXPECT_THAT(some_of(one.mine), ::testing::Each(2));
  return counters_of(one.store);
}

TEST(StoreInC, HeedsOptions) {
  const Box box(2);
  EXPECT_EQ(counted_with(box, {}).by_index, 0U);
  EXPECT_GT(counted_with(box, {}).cached, 0U);
  EXPECT_GT(counted_with(box, {{"static_index", "0"}}).by_index, 0U);
  EXPECT_EQ(counted_with(box, {}).pushed_early, 0U);
  EXPECT_EQ(counted_with(box, {{"push_early", "1"}}).pushed_early, 1U);
  for (const auto& [name, value, words] : {std::array{"threads", "0", "threads"},
                                           {"batches", "65", "65"},
                                           {"gather_again", "1.5", "gather_again"}}) {
    const Given given(box, "heeded", 0, 1);
    given.add(kNumbers);
    given.set(name, value);
    phub_store* store = nullptr;
    expect_refused(phub_store_create(given.worker, given.store, &store), PHUB_INVALID, words);
    EXPECT_EQ(store, nullptr);
  }
}

uint64_t rows_in(const phub_store* store, const TableSpec& table) {
  std::vector<uint64_t> rows(table.rows + table.spare);
  expect_ok(phub_store_rows(store, 0, rows.data(), rows.size()));
  return rows.size() - static_cast<uint64_t>(std::ranges::count(rows, PHUB_NO_ROW));
}

bool has_row(phub_store_thread* mine, uint64_t row) {
  int has = -1;
  expect_ok(phub_store_has_row(mine, 0, row, &has));
  EXPECT_TRUE(has == 0 || has == 1);
  return has == 1;
}

TEST(StoreInC, RowsComeAndGo) {
  const Box box(2);
  const TableSpec table = {.name = "grows", .rows = 2, .type = "i32", .spare = 2};
  const Single one(box, "grows", table);
  constexpr uint64_t kRow = 123456789012345;
  expect_ok(phub_store_add_row(one.mine, 0, kRow));
  for (int clock = 0; clock < 2; ++clock) expect_ok(phub_store_clock(one.mine));
  EXPECT_TRUE(has_row(one.mine, kRow));
  EXPECT_EQ(rows_in(one.store, table), 3U);
  int32_t value = 7;
  expect_ok(phub_store_update(one.mine, 0, &kRow, 1, "i32", &value, sizeof value));
  value = 0;
  expect_ok(phub_store_read(one.mine, 0, &kRow, 1, "i32", &value, sizeof value));
  EXPECT_EQ(value, 7);
  expect_refused(phub_store_add_row(one.mine, 0, kRow), PHUB_INVALID, "already");
  expect_refused(phub_store_add_row(one.mine, 0, PHUB_NO_ROW), PHUB_INVALID, "kNoRow");
  expect_refused(phub_store_delete_row(one.mine, 0, 99), PHUB_INVALID, "no row 99");
  expect_ok(phub_store_delete_row(one.mine, 0, kRow));
  for (int clock = 0; clock < 2; ++clock) expect_ok(phub_store_clock(one.mine));
  EXPECT_FALSE(has_row(one.mine, kRow));
  EXPECT_EQ(rows_in(one.store, table), 2U);
  expect_refused(phub_store_read(one.mine, 0, &kRow, 1, "i32", &value, sizeof value), PHUB_INVALID,
                 "was deleted");
}

// ---- Threads.

// Until a thread of the store is in a call, for 20 s at most.
void await_call(const phub_store* store) {
  phub_store_counters counters = {};
  counters.size = sizeof counters;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  phub_code code = PHUB_OK;
  while (code == PHUB_OK && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    code = phub_store_stats(store, &counters);
  }
  expect_refused(code, PHUB_WRONG_THREAD, "is in a call");
}

TEST(StoreInC, AThreadIsForWhoMadeIt) {
  const Box box(2);
  const Single one(box, "own", kNumbers);
  const auto expect_wrong = [](phub_code code) {
    expect_refused(code, PHUB_WRONG_THREAD, "another thread's");
  };
  // New ones have the numbers of the system's that ended before.
  for (int thread = 0; thread < 2; ++thread) {
    std::thread([&] {
      int answer = 0;
      int64_t value = 0;
      const uint64_t row = 0;
      expect_wrong(phub_store_clock(one.mine));
      expect_wrong(phub_store_begin_virtual(one.mine));
      expect_wrong(phub_store_begin_gathering(one.mine));
      expect_wrong(phub_store_finish(one.mine));
      expect_wrong(phub_store_is_virtual(one.mine, &answer));
      expect_wrong(phub_store_has_row(one.mine, 0, 0, &answer));
      expect_wrong(phub_store_add_row(one.mine, 0, 0));
      expect_wrong(phub_store_delete_row(one.mine, 0, 0));
      expect_wrong(phub_store_read(one.mine, 0, &row, 1, "i64", &value, sizeof value));
      expect_wrong(phub_store_update(one.mine, 0, &row, 1, "i64", &value, sizeof value));
    }).join();
  }
  add_to_some(one.mine, 1);
  EXPECT_THAT(some_of(one.mine), ::testing::Each(1));
  // Made by one that has ended, it can still be destroyed, and its number is free.
  const Given given(box, "left", 0, 1);
  given.add(kNumbers);
  phub_store* store = given.made();
  phub_store_thread* left = nullptr;
  std::thread([&] { left = thread_of(store, 0); }).join();
  std::thread([&] { expect_wrong(phub_store_clock(left)); }).join();
  expect_refused(phub_store_thread_create(store, 0, &left), PHUB_INVALID, "already");
  expect_ok(phub_store_thread_destroy(left));
  phub_store_thread* mine = thread_of(store, 0);
  add_to_some(mine, 3);
  expect_ok(phub_store_thread_destroy(mine));
  expect_ok(phub_store_destroy(store));
}

// Nobody may ask for all of it meanwhile; and what others destroy stays until the call returns.
TEST(StoreInC, IsWholeWhileAThreadIsInACall) {
  const Box box(2);
  const Given given(box, "busy", 0, 1);
  given.add(kNumbers);
  given.set("threads", "2");
  phub_store* store = given.made();
  std::atomic<phub_store_thread*> first = nullptr;
  std::thread waits([&] {
    phub_store_thread* mine = thread_of(store, 0);
    const std::array<int64_t, kSome.size()> by = {5, 5, 5};
    expect_ok(phub_store_update(mine, 0, kSome.data(), kSome.size(), "i64", by.data(), sizeof by));
    first = mine;
    expect_ok(phub_store_clock(mine));
    phub_store_thread* gone = nullptr;
    expect_refused(phub_store_clock(mine), PHUB_BAD_HANDLE, "phub_store_thread was destroyed");
    expect_refused(phub_store_thread_create(store, 0, &gone), PHUB_BAD_HANDLE,
                   "phub_store was destroyed");
  });
  phub_store_thread* second = thread_of(store, 1);
  while (first == nullptr) std::this_thread::yield();
  await_call(store);  // its clock
  std::array<int64_t, 6> table = {};
  expect_refused(phub_store_table(store, 0, table.data(), sizeof table), PHUB_WRONG_THREAD,
                 "is in a call");
  std::array<uint64_t, 6> rows = {};
  expect_refused(phub_store_rows(store, 0, rows.data(), rows.size()), PHUB_WRONG_THREAD,
                 "is in a call");
  expect_ok(phub_store_destroy(store));
  expect_ok(phub_store_thread_destroy(first));
  expect_ok(phub_store_clock(second));
  EXPECT_THAT(some_of(second), ::testing::Each(5));
  waits.join();
  expect_refused(phub_store_clock(second), PHUB_INVALID, "thread 0 of the store is gone");
  expect_ok(phub_store_thread_destroy(second));
}

// ---- Wrong calls.

TEST(StoreInC, RefusesWrongOptions) {
  const Box box(2);
  const Given given(box, "wrong", 0, 1);
  phub_store_options* const options = given.store;
  phub_store* store = nullptr;
  expect_refused(phub_store_options_create(nullptr), PHUB_INVALID, "options is null");
  expect_refused(phub_store_options_set(nullptr, "threads", "1"), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_options_set(options, nullptr, "1"), PHUB_INVALID, "name is null");
  expect_refused(phub_store_options_set(options, "threads", nullptr), PHUB_INVALID, "value is");
  expect_refused(phub_store_options_set(options, "static-index", "1"), PHUB_INVALID,
                 "'static_index'?");
  expect_refused(phub_store_options_set(options, "threads", "two"), PHUB_INVALID, "'two'");
  expect_refused(phub_store_options_set_number(options, "threads", -1), PHUB_INVALID, "got -1");
  expect_refused(phub_store_options_set_number(options, "batches", int64_t{1} << 32), PHUB_INVALID,
                 "4294967296");
  expect_refused(phub_store_options_set(options, "numa", "2"), PHUB_INVALID, "got 2");
  expect_refused(phub_store_options_set(options, "gather_again", "half"), PHUB_INVALID, "'half'");
  expect_refused(phub_store_options_set(options, "gather_again", "0.1x"), PHUB_INVALID, "0.1x");
  expect_refused(phub_store_options_add_table(options, nullptr, 1, 1, "f32", "add", 0, 0),
                 PHUB_INVALID, "name is null");
  expect_refused(phub_store_options_add_table(options, "t", 1, 1, nullptr, "add", 0, 0),
                 PHUB_INVALID, "type is null");
  expect_refused(phub_store_options_add_table(options, "t", 1, 1, "f32", nullptr, 0, 0),
                 PHUB_INVALID, "operation is null");
  expect_refused(phub_store_create(given.worker, options, &store), PHUB_INVALID, "0");
  given.add({.name = "t", .rows = 3, .type = "f32", .operation = "or"});
  expect_refused(phub_store_create(given.worker, options, &store), PHUB_INVALID,
                 "no operation 'or' of values of type 'f32'");
  expect_refused(phub_store_create(nullptr, options, &store), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_create(given.worker, nullptr, &store), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_create(given.worker, options, nullptr), PHUB_INVALID, "store is null");
  const void* const other = given.worker;
  expect_refused(
      phub_store_create(given.worker, static_cast<const phub_store_options*>(other), &store),
      PHUB_BAD_HANDLE, "this is a phub_options, a phub_store_options is needed");
  expect_ok(phub_options_set_number(given.worker, "rank", -1));
  expect_refused(phub_store_create(given.worker, options, &store), PHUB_INVALID, "rank is -1");
  EXPECT_EQ(store, nullptr);
}

TEST(StoreInC, RefusesWrongCallsOfAStore) {
  const Box box(2);
  const Single one(box, "wrong", kNumbers);
  std::array<int64_t, 6> table = {};
  std::array<uint64_t, 6> rows = {};
  phub_store_counters counters = {};
  phub_store_thread* second = nullptr;
  expect_refused(phub_store_table(nullptr, 0, table.data(), sizeof table), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_table(one.store, 1, table.data(), sizeof table), PHUB_INVALID,
                 "no table 1");
  expect_refused(phub_store_table(one.store, 0, nullptr, sizeof table), PHUB_INVALID, "into is");
  expect_refused(phub_store_table(one.store, 0, table.data(), sizeof table - 8), PHUB_INVALID,
                 "has 48 bytes, not 40");
  expect_refused(phub_store_rows(one.store, 0, rows.data(), 5), PHUB_INVALID, "6 places, not 5");
  expect_refused(phub_store_rows(one.store, 0, nullptr, 6), PHUB_INVALID, "rows is null");
  expect_refused(phub_store_rows(one.store, 9, rows.data(), 6), PHUB_INVALID, "no table 9");
  expect_refused(phub_store_stats(one.store, nullptr), PHUB_INVALID, "counters is null");
  expect_refused(phub_store_stats(one.store, &counters), PHUB_INVALID, "size is 0");
  expect_refused(phub_store_thread_create(one.store, 0, &second), PHUB_INVALID, "already");
  expect_refused(phub_store_thread_create(one.store, 1, &second), PHUB_INVALID, "0 to 0");
  expect_refused(phub_store_thread_create(one.store, 0, nullptr), PHUB_INVALID, "thread is null");
  expect_refused(phub_store_thread_create(nullptr, 0, &second), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_rank(nullptr, nullptr, nullptr), PHUB_BAD_HANDLE, "null");
  expect_ok(phub_store_rank(one.store, nullptr, nullptr));
  expect_refused(phub_store_clocks(one.store, nullptr), PHUB_INVALID, "clocks is null");
  expect_refused(phub_store_clocks(nullptr, nullptr), PHUB_BAD_HANDLE, "null");
  const void* bytes = nullptr;
  size_t size = 0;
  expect_refused(phub_store_restored(one.store, "mine", &bytes, &size), PHUB_NOT_FOUND,
                 "nothing was restored as 'mine'");
  expect_refused(phub_store_restored(one.store, nullptr, &bytes, &size), PHUB_INVALID, "name is");
  expect_refused(phub_store_restored(one.store, "mine", nullptr, &size), PHUB_INVALID, "bytes is");
  expect_refused(phub_store_restored(one.store, "mine", &bytes, nullptr), PHUB_INVALID, "size is");
  expect_refused(phub_store_restored(nullptr, "mine", &bytes, &size), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_destroy(nullptr), PHUB_BAD_HANDLE, "null");
  expect_refused(phub_store_thread_destroy(nullptr), PHUB_BAD_HANDLE, "null");
  EXPECT_EQ(second, nullptr);
  // With updates that were not clocked.
  const int64_t by = 4;
  expect_ok(phub_store_update(one.mine, 0, kSome.data(), 1, "i64", &by, sizeof by));
  expect_refused(phub_store_table(one.store, 0, table.data(), sizeof table), PHUB_INVALID,
                 "not clocked");
  expect_ok(phub_store_clock(one.mine));
  expect_ok(phub_store_table(one.store, 0, table.data(), sizeof table));
  expect_ok(phub_store_rows(one.store, 0, rows.data(), 6));
  EXPECT_EQ(table, (std::array<int64_t, 6>{0, 0, 0, 0, 0, 4}));
  EXPECT_EQ(rows, (std::array<uint64_t, 6>{0, 1, 2, 3, 4, 5}));
}

TEST(StoreInC, RefusesWrongCallsOfAThread) {
  const Box box(2);
  const Single one(box, "wrong", kNumbers);
  phub_store_thread* const mine = one.mine;
  std::array<int64_t, 4> values = {1, 2, 3, 4};
  const uint64_t* const rows = kSome.data();
  // Reads and updates of some rows with everything as it should be but this.
  struct Access {
    uint32_t table = 0;
    const uint64_t* rows = nullptr;
    size_t count = 3;
    const char* type = "i64";
    void* values = nullptr;
    size_t bytes = 24;
  };
  const auto expect_both = [&](const Access& a, const std::string& words) {
    expect_refused(phub_store_read(mine, a.table, a.rows, a.count, a.type, a.values, a.bytes),
                   PHUB_INVALID, words);
    expect_refused(phub_store_update(mine, a.table, a.rows, a.count, a.type, a.values, a.bytes),
                   PHUB_INVALID, words);
  };
  const std::array<uint64_t, 3> outside = {5, 6, 0};
  auto* const odd = reinterpret_cast<std::byte*>(values.data()) + 2;
  expect_both({.table = 1, .rows = rows, .values = values.data()}, "no table 1");
  expect_both({.values = values.data()}, "rows is null");
  expect_both({.rows = rows}, "memory is null");
  expect_both({.rows = outside.data(), .values = values.data()}, "no row 6");
  expect_both({.rows = rows, .values = values.data(), .bytes = 32}, "32 bytes");
  expect_both({.rows = rows, .values = values.data(), .bytes = 20}, "20 bytes");
  expect_both({.rows = rows, .count = 2, .values = values.data()}, "24 bytes");
  expect_both({.rows = rows, .count = size_t{1} << 61, .values = values.data(), .bytes = 0},
              "do not fit in 0 bytes");
  expect_both({.rows = rows, .values = odd}, "aligned to 4");
  expect_both({.rows = rows, .type = "f64", .values = values.data()}, "values of type i64");
  expect_both({.rows = rows, .type = "int", .values = values.data()}, "no type 'int'");
  expect_both({.rows = rows, .type = nullptr, .values = values.data()}, "type is null");
  EXPECT_EQ(values, (std::array<int64_t, 4>{1, 2, 3, 4})) << "a read that failed wrote";
  expect_ok(phub_store_read(mine, 0, nullptr, 0, "i64", nullptr, 0));
  expect_refused(phub_store_finish(mine), PHUB_INVALID, "no iteration is being recorded");
  expect_refused(phub_store_is_virtual(mine, nullptr), PHUB_INVALID, "is_virtual is null");
  expect_refused(phub_store_has_row(mine, 0, 0, nullptr), PHUB_INVALID, "has_row is null");
  expect_refused(phub_store_add_row(mine, 0, 9), PHUB_INVALID, "spare rows");
  expect_refused(phub_store_delete_row(mine, 0, 1), PHUB_INVALID, "spare rows");
  expect_ok(phub_store_begin_virtual(mine));
  expect_refused(phub_store_begin_gathering(mine), PHUB_INVALID, "is being recorded already");
  expect_ok(phub_store_clock(mine));
  expect_ok(phub_store_finish(mine));
  // None of that has changed anything.
  EXPECT_THAT(some_of(mine), ::testing::Each(0));
}

}  // namespace c_abi_test
}  // namespace phub
