// Stores that are saved with their job: the server, or a rank, is killed between clocks, and all
// begin anew with nothing but what was saved. What is read must be what one thread computes that
// nothing disturbs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/iterstore/programs.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {
namespace saving_test {

using phub::testing::becomes;
using phub::testing::Call;
using phub::testing::Calls;
using phub::testing::each_rank;
using phub::testing::expect_error;
using phub::testing::Oracle;
using phub::testing::Words;

constexpr uint64_t kEvery = 5;

struct Gone {};  // a rank dies with it

// A program: what each thread calls in each clock. The seeds of its updates are the numbers of a
// generator that goes on from clock to clock, which is the state that a rank saves.
struct Program {
  uint32_t ranks = 1;
  uint64_t clocks = 40;
  StoreOptions options;
  std::vector<std::vector<Calls>> first, recorded;  // by rank and thread: before, and of all clocks

  explicit Program(std::mt19937_64& random) {
    ranks = static_cast<uint32_t>(1 + random() % 3);
    options.threads = static_cast<uint32_t>(1 + random() % 2);
    options.tables = phub::testing::some_tables(random);
    options.tables.push_back({.name = "last", .rows = 300, .type = "f64", .fixed = true});
    options.placement = random() % 4 > 0;
    options.static_index = random() % 4 > 0;
    options.batches = static_cast<uint32_t>(1 + random() % 10);
    options.push_early = options.static_index && random() % 2 == 0;
    for (auto* const calls : {&first, &recorded}) {
      calls->resize(ranks);
      for (uint32_t r = 0; r < ranks; ++r) {
        for (uint32_t t = 0; t < options.threads; ++t) {
          (*calls)[r].push_back(phub::testing::some_calls(options.tables, r * options.threads + t,
                                                          ranks * options.threads, random));
        }
      }
    }
  }
  std::mt19937_64 generator(uint32_t rank) const { return std::mt19937_64(rank + 77); }
  // Of a thread, in the clock whose number of the generator this is.
  Calls calls(uint32_t rank, uint32_t thread, uint64_t number) const {
    std::mt19937_64 random(number + thread);
    if (options.push_early) {  // what comes late strays, and ends the saving
      Calls same = recorded[rank][thread];
      for (Call& call : same) call.seed = random();
      return same;
    }
    return phub::testing::like(recorded[rank][thread], options.tables, false, random);
  }
};

// What a thread must read in a clock: by rank, thread and clock. And the tables at the end.
struct Expected {
  std::vector<std::vector<std::vector<std::vector<Words>>>> reads;
  std::vector<Words> tables;

  explicit Expected(const Program& program) {
    Oracle oracle(program.options.tables);
    reads.resize(program.ranks);
    std::vector<std::mt19937_64> generators;
    for (uint32_t r = 0; r < program.ranks; ++r) {
      generators.push_back(program.generator(r));
      reads[r].resize(program.options.threads);
      for (uint32_t t = 0; t < program.options.threads; ++t) {
        oracle.run(r, t, program.first[r][t]);
      }
    }
    oracle.clock();
    for (uint64_t c = 0; c < program.clocks; ++c) {
      for (uint32_t r = 0; r < program.ranks; ++r) {
        const uint64_t number = generators[r]();
        for (uint32_t t = 0; t < program.options.threads; ++t) {
          reads[r][t].push_back(oracle.run(r, t, program.calls(r, t, number)));
        }
      }
      oracle.clock();
    }
    for (uint32_t t = 0; t < program.options.tables.size(); ++t) {
      tables.push_back(oracle.table(t));
    }
  }
};

std::vector<std::byte> text_of(const std::mt19937_64& generator) {
  std::ostringstream text;
  text << generator;
  const std::string all = text.str();
  const auto bytes = std::as_bytes(std::span(all));
  return {bytes.begin(), bytes.end()};
}

bool ends_a_store(ErrorCode code) {
  return code == ErrorCode::kRewound || code == ErrorCode::kUnavailable ||
         code == ErrorCode::kTimeout || code == ErrorCode::kRankLost ||
         code == ErrorCode::kFenced || code == ErrorCode::kTaken || code == ErrorCode::kNotFound;
}

class SavedStores : public phub::testing::SavedBoxTest {
 protected:
  SavedStores() : SavedBoxTest(PHUB_BINARY) { serve(kEvery); }

  StoreOptions options_of(const StoreOptions& store, const std::string& name, uint32_t rank,
                          uint32_t ranks) const {
    JobSpec spec;
    spec.name = name;
    spec.world_size = ranks;
    spec.lease_ms = 30'000;  // nobody is to be lost for being slow
    spec.chunk_elements = 64;
    spec.on_loss = "fail";
    spec.consistency = consistency_;
    spec.slack = slack_;
    StoreOptions all = store;
    all.worker = options(spec, static_cast<int32_t>(rank));
    return all;
  }

  // Calls body() with new stores until one of them does not end early, and returns how often it
  // went on from a checkpoint.
  static void until_the_end(const std::function<void()>& body) {
    for (;;) {
      try {
        return body();
      } catch (const Gone&) {
      } catch (const Error& error) {
        if (!ends_a_store(error.code())) {
          ADD_FAILURE() << error.what();
          return;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  // A body for each thread; throws the first of their errors.
  static void threads(uint32_t count, const std::function<void(uint32_t thread)>& body) {
    std::mutex mutex;
    std::exception_ptr first;
    std::vector<std::jthread> all;
    for (uint32_t t = 0; t < count; ++t) {
      all.emplace_back([&, t] {
        try {
          body(t);
        } catch (const Gone&) {
          const std::lock_guard lock(mutex);
          first = std::current_exception();
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
      });
    }
    all.clear();
    if (first) std::rethrow_exception(first);
  }

  void run_thread(const Program& program, const Expected& expected, const std::string& name,
                  uint32_t rank, uint32_t t, Store& store, std::mt19937_64& generator) {
    StoreThread mine(store, t);
    phub::testing::run(mine, program.options.tables, program.first[rank][t]);
    mine.clock();
    mine.begin_virtual();
    phub::testing::run(mine, program.options.tables, program.recorded[rank][t]);
    mine.clock();
    mine.finish();
    std::mt19937_64 own = program.generator(rank);
    if (const auto saved = store.restored("generator")) {
      ++went_on_;
      std::istringstream(
          std::string(reinterpret_cast<const char*>(saved->data()), saved->size())) >>
          own;
      EXPECT_FALSE(store.restored("other"));
      EXPECT_EQ((store.clocks() - 1) % kEvery, 0u);
    } else {
      EXPECT_EQ(store.clocks(), 1u);
    }
    // What is read in a round that a lost rank did not complete counts for nothing: an error
    // follows within two clocks.
    std::vector<std::vector<Words>> reads;
    const uint64_t began = store.clocks() - 1;
    const auto expect_reads = [&](uint64_t clock) {
      if (consistency_ != "bsp" || clock < began) return;
      EXPECT_TRUE(reads[clock - began] == expected.reads[rank][t][clock])
          << "rank " << rank << ", thread " << t << ", clock " << clock;
    };
    for (uint64_t c = began; c < program.clocks; ++c) {
      while (c >= allowed_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (t == 0 && dies(rank, c, name)) throw Gone();
      const uint64_t number = own();
      reads.push_back(
          phub::testing::run(mine, program.options.tables, program.calls(rank, t, number)));
      if (t == 0) generator = own;
      mine.clock();
      if (c >= 2) expect_reads(c - 2);
    }
    for (uint64_t c = program.clocks - 2; c < program.clocks; ++c) expect_reads(c);
  }

  // Until the program has come to its end, and checks its tables.
  void run(const Program& program, const Expected& expected, const std::string& name) {
    each_rank(program.ranks, [&](uint32_t rank) {
      std::mt19937_64 generator;
      StoreOptions options = options_of(program.options, name, rank, program.ranks);
      until_the_end([&] {
        options.worker.saver = [&](uint64_t clocks) {
          saved_clocks_ = std::max<uint64_t>(saved_clocks_, clocks);
          return RankState{{"generator", text_of(generator)}};
        };
        Store store(options);
        threads(program.options.threads, [&](uint32_t t) {
          run_thread(program, expected, name, rank, t, store, generator);
        });
        for (uint32_t t = 0; t < program.options.tables.size(); ++t) {
          const std::vector<std::byte> got = store.table(t);
          const Words& want = expected.tables[t];
          ASSERT_EQ(got.size(), want.size() * 4);
          EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size()), 0)
              << "table " << program.options.tables[t].name;
        }
      });
    });
  }

  // A rank dies before a clock, once more was saved, this many rounds, than at the death before.
  struct Death {
    uint64_t clock = 0;
    uint32_t rank = 0;
    uint64_t more_saved = 0;
  };
  bool dies(uint32_t rank, uint64_t clock, const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (deaths_.empty() || deaths_.front().rank != rank || deaths_.front().clock > clock) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(8));  // for the box to write
    const uint64_t durable = status(name + ".rows").durable_round;
    if (durable < durable_at_death_ + deaths_.front().more_saved) return false;
    durable_at_death_ = durable;
    deaths_.erase(deaths_.begin());
    return true;
  }

  std::string consistency_ = "bsp";
  uint32_t slack_ = 0;
  std::atomic<uint64_t> allowed_ = ~uint64_t{0};
  std::atomic<uint64_t> went_on_ = 0, saved_clocks_ = 0;
  std::mutex mutex_;
  std::vector<Death> deaths_;  // one after another
  uint64_t durable_at_death_ = 0;
};

TEST_F(SavedStores, GoOnToTheBitAfterTheServerWasKilled) {
  const auto seeds = phub::testing::fresh_seeds(phub::testing::scaled(6));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    const Program program(random);
    const Expected expected(program);
    const std::string name = fmt::format("killed{}", seed);
    allowed_ = went_on_ = 0;
    std::jthread running([&] { run(program, expected, name); });
    const auto allow = [&](uint64_t clock) {
      allowed_ = std::max<uint64_t>(allowed_, std::min(program.clocks - 1, clock));
    };
    uint64_t durable = 0;
    for (int kill = 0; kill < 2; ++kill) {
      EXPECT_TRUE(becomes_status(name + ".rows", [&](const JobStatus& job) {
        allow(job.next_saved_round + 3);
        return job.durable_round > durable;
      }));
      allow(allowed_ + random() % 5);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      durable = std::max(durable, status(name + ".rows").durable_round);
      die_and_come_back(kEvery);
      allow(allowed_ + 2);  // who has pushed a clock waits for it in the next one, and notices
    }
    allowed_ = ~uint64_t{0};
    running.join();
    EXPECT_GE(went_on_, 2 * program.ranks * program.options.threads);
    if (HasFailure()) return;
  }
}

TEST_F(SavedStores, GoOnToTheBitAfterARankDied) {
  const auto seeds = phub::testing::fresh_seeds(phub::testing::scaled(4));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    Program program(random);
    program.clocks = 400;
    went_on_ = 0;
    const auto anyone = [&] { return static_cast<uint32_t>(random() % program.ranks); };
    deaths_ = {{random() % 20, anyone(), 0},
               {random() % 20, anyone(), kEvery},
               {random() % 100, anyone(), 2 * kEvery}};
    durable_at_death_ = 0;
    const Expected expected(program);
    run(program, expected, fmt::format("died{}", seed));
    EXPECT_TRUE(deaths_.empty());
    EXPECT_GE(went_on_, 2 * program.ranks * program.options.threads);
    if (HasFailure()) return;
  }
}

// The next store of the name begins anew, and so does one that no box saves.
TEST_F(SavedStores, AStoreThatHasEndedBeginsAnew) {
  std::mt19937_64 random(phub::testing::fresh_seeds(1).first);
  Program program(random);
  program.clocks = 2 * kEvery + 1;
  const Expected expected(program);
  for (int i = 0; i < 2; ++i) {
    saved_clocks_ = 0;
    run(program, expected, "ended");
    EXPECT_GE(saved_clocks_, 1 + 2 * kEvery);
    EXPECT_EQ(went_on_, 0u);
  }
}

// Out of lock-step every update counts once.
TEST_F(SavedStores, LoseNoUpdateOutOfLockStep) {
  constexpr uint64_t kClocks = 300;
  constexpr uint32_t kRanks = 2;
  struct Way {
    const char* consistency;
    uint32_t slack;
  };
  for (const Way& way : {Way{"ssp", 0}, Way{"ssp", 2}, Way{"async", 0}}) {
    consistency_ = way.consistency;
    slack_ = way.slack;
    went_on_ = 0;
    deaths_ = {{17, 0, kEvery}, {41, 1, 4 * kEvery}};
    durable_at_death_ = 0;
    const std::string name = fmt::format("{}{}", way.consistency, way.slack);
    SCOPED_TRACE(name);
    each_rank(kRanks, [&](uint32_t rank) {
      until_the_end([&] {
        StoreOptions options = options_of(StoreOptions(), name, rank, kRanks);
        options.tables = {{.name = "t", .rows = 1000, .type = "i64"}};
        options.worker.saver = [](uint64_t) { return RankState(); };
        Store store(options);
        StoreThread mine(store, 0);
        mine.begin_virtual();
        mine.finish();
        if (store.clocks() > 0) ++went_on_;
        for (uint64_t c = store.clocks(); c < kClocks; ++c) {
          if (dies(rank, c, name)) throw Gone();
          for (const uint64_t row : {uint64_t{7}, 100 + c, uint64_t{500} + rank}) {
            mine.update(0, row, static_cast<int64_t>(c + 1));
          }
          mine.clock();
        }
        const std::vector<std::byte> bytes = store.table(0);
        std::vector<int64_t> got(1000);
        std::memcpy(got.data(), bytes.data(), bytes.size());
        constexpr int64_t kOfRank = kClocks * (kClocks + 1) / 2;
        EXPECT_EQ(got[7], kRanks * kOfRank);
        for (uint32_t r = 0; r < kRanks; ++r) EXPECT_EQ(got[500 + r], kOfRank);
        for (uint64_t c = 0; c < kClocks; ++c) {
          EXPECT_EQ(got[100 + c], static_cast<int64_t>(kRanks * (c + 1)));
        }
        store.table(0);  // in the same round on all ranks
      });
    });
    EXPECT_GE(went_on_, 2u * kRanks);
  }
}

// Two ranks, with a table of which each has recorded a half of its half.
class TwoRanks : public SavedStores {
 protected:
  void run_both(const std::function<void(Store& store, StoreThread& mine, uint32_t rank)>& body,
                uint64_t first_row = 0) {
    each_rank(ranks_, [&](uint32_t rank) { run_rank(rank, body, first_row); });
  }
  void run_rank(uint32_t rank,
                const std::function<void(Store& store, StoreThread& mine, uint32_t rank)>& body,
                uint64_t first_row = 0) {
    StoreOptions options = options_of(StoreOptions(), "two", rank, ranks_);
    options.worker.spec.join_limit_ms = join_limit_ms_;
    options.tables = {{.name = "t", .rows = 600, .type = "i32", .fixed = !alike_}};
    options.worker.saver = [](uint64_t) { return RankState(); };
    Store store(options);
    StoreThread mine(store, 0);
    mine.begin_virtual();
    if (!alike_) update(mine, rank, first_row);
    mine.finish();
    body(store, mine, rank);
  }
  static void update(StoreThread& mine, uint32_t rank, uint64_t first_row = 0) {
    for (uint64_t i = 0; i < 100; ++i) mine.update(0, rank * 200 + first_row + i, int32_t{1});
    mine.clock();
  }
  uint64_t durable() const { return status("two.rows").durable_round; }
  // As many on all ranks; afterwards something is saved.
  void make_clocks(StoreThread& mine, uint32_t rank) {
    for (int c = 0; c < 300; ++c) {
      update(mine, rank);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_GT(durable(), 0u);
  }
  static int32_t first_of(StoreThread& mine, uint32_t rank) {
    return mine.read<int32_t>(0, rank * 200);
  }
  uint32_t ranks_ = 2, join_limit_ms_ = 60'000;
  bool alike_ = false;  // nothing is recorded, so that the job has the same keys with more ranks
};

// table() asks whether somebody strays, which is a round of one key; states are saved all the same.
TEST_F(TwoRanks, TablesBetweenClocksDelayNothing) {
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    for (int32_t c = 1; c <= 20; ++c) {
      update(mine, rank);
      int32_t first = 0;
      std::memcpy(&first, store.table(0).data(), sizeof first);
      EXPECT_EQ(first, c);
    }
  });
}

// What strays ends the saving, and not the store; who dies after that goes on from before.
TEST_F(TwoRanks, WhatStraysIsNotSavedAndGoesOnFromBefore) {
  const auto stray = [&](StoreThread& mine, uint32_t rank) {
    if (rank == 0) EXPECT_EQ(mine.read<int32_t>(0, 399), 0);
    update(mine, rank);
  };
  std::atomic<uint64_t> strayed_at = 0;
  EXPECT_THROW(run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
                 EXPECT_EQ(store.clocks(), 0u);
                 make_clocks(mine, rank);
                 stray(mine, rank);
                 EXPECT_EQ(store.stats().widened, 1u);
                 strayed_at = store.clocks();
                 for (uint64_t c = 0; c < 2 * kEvery; ++c) update(mine, rank);
                 EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
                 store.table(0);  // both have come so far
                 throw Gone();
               }),
               Gone);
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    EXPECT_GT(store.clocks(), 0u);
    EXPECT_LT(store.clocks(), strayed_at);
    EXPECT_EQ(store.clocks() % kEvery, 0u);
    EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
    stray(mine, rank);
    EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
    store.table(0);
  });
  const auto all_ended = [this] { return ControlClient(server_->address()).status().jobs.empty(); };
  EXPECT_TRUE(becomes(all_ended));
  run_both([](Store& store, StoreThread&, uint32_t) { EXPECT_EQ(store.clocks(), 0u); });
}

TEST_F(TwoRanks, OtherRowsAreRefused) {
  EXPECT_THROW(run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
                 make_clocks(mine, rank);
                 store.table(0);
                 throw Gone();
               }),
               Gone);
  // Each rank finds it out; or that the other one is gone, which was quicker.
  std::atomic<uint32_t> mismatches = 0;
  each_rank(2, [&](uint32_t rank) {
    try {
      run_rank(
          rank, [](Store&, StoreThread&, uint32_t) { FAIL(); }, 50);
    } catch (const Error& error) {
      const bool matches = error.code() == ErrorCode::kMismatch;
      EXPECT_TRUE(matches || error.code() == ErrorCode::kRankLost) << error.what();
      EXPECT_TRUE(!matches ||
                  std::string(error.what()).find("rows in other places") != std::string::npos)
          << error.what();
      mismatches += matches ? 1 : 0;
    }
  });
  EXPECT_GE(mismatches, 1u);
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    EXPECT_GT(store.clocks(), 0u);
    EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
    store.table(0);
  });
}

// The job is made anew each time: of one that is there the box itself says that it differs.
TEST_F(TwoRanks, GoOnAsTwo) {
  alike_ = true;
  EXPECT_THROW(run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
                 make_clocks(mine, rank);
                 store.table(0);
                 throw Gone();
               }),
               Gone);
  die_and_come_back(kEvery);
  ranks_ = 1;
  expect_error(ErrorCode::kMismatch, "clocks by 2 ranks, and now has 1",
               [&] { run_both([](Store&, StoreThread&, uint32_t) { FAIL(); }); });
  die_and_come_back(kEvery);
  ranks_ = 3;  // the third has saved nothing
  join_limit_ms_ = 2000;
  std::atomic<uint32_t> told = 0;
  each_rank(ranks_, [&](uint32_t rank) {
    try {
      run_rank(rank, [](Store&, StoreThread&, uint32_t) { FAIL(); });
    } catch (const Error& error) {
      const std::string what = error.what();
      if (what.find("clocks by 2 ranks, and now has 3") != std::string::npos) ++told;
      if (rank == 2) EXPECT_EQ(what.find("by 2 ranks"), std::string::npos);
    }
  });
  EXPECT_EQ(told, 2u);
  die_and_come_back(kEvery);
  ranks_ = 2;
  join_limit_ms_ = 60'000;
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    EXPECT_GT(store.clocks(), 0u);
    EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
    store.table(0);
  });
}

// Without an exception that destroys it. What waits is ended.
TEST_F(TwoRanks, GoOnAfterWhoAbandonsAndLivesOn) {
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    make_clocks(mine, rank);
    if (rank == 0) {
      std::jthread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        store.abandon();
      });
      expect_error(ErrorCode::kFenced, "", [&] {
        for (int c = 0; c < 2; ++c) update(mine, rank);  // the other makes no more
      });
    } else {
      expect_error(ErrorCode::kRankLost, "", [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        for (int c = 0; c < 2; ++c) update(mine, rank);
      });
      store.abandon();
    }
    store.abandon();  // again
    EXPECT_THROW(store.table(0), Error);
  });
  run_both([&](Store& store, StoreThread& mine, uint32_t rank) {
    EXPECT_GT(store.clocks(), 0u);
    EXPECT_EQ(first_of(mine, rank), static_cast<int32_t>(store.clocks()));
    store.table(0);
  });
}

// One that has joined nothing yet joins nothing.
TEST_F(TwoRanks, AbandonedBeforeItBegins) {
  StoreOptions options = options_of(StoreOptions(), "none", 0, 1);
  options.tables = {{.name = "t", .rows = 4}};
  Store store(options);
  StoreThread mine(store, 0);
  store.abandon();
  expect_error(ErrorCode::kFenced, "'none' was abandoned", [&] { mine.clock(); });
  expect_error(ErrorCode::kFenced, "'none' was abandoned", [&] { store.table(0); });
}

TEST_F(TwoRanks, RecordOnceWithAllRanks) {
  run_both([&](Store&, StoreThread& mine, uint32_t) {
    expect_error(ErrorCode::kInvalid, "records once", [&] { mine.begin_virtual(); });
    expect_error(ErrorCode::kInvalid, "records once", [&] { mine.begin_gathering(); });
  });
  StoreOptions options = options_of(StoreOptions(), "wrong", 0, 1);
  options.tables = {{.name = "t", .rows = 4}};
  options.worker.saver = [](uint64_t) { return RankState(); };
  const auto refused = [&](const std::string& why, const std::function<void(StoreOptions&)>& with) {
    StoreOptions wrong = options;
    with(wrong);
    expect_error(ErrorCode::kInvalid, why, [&] { Store store(wrong); });
  };
  refused("on_loss must be 'fail'", [](StoreOptions& of) { of.worker.spec.on_loss = "shrink"; });
  refused("leave out gather_again", [](StoreOptions& of) { of.gather_again = 0.1; });
  refused("table 't' has spare rows", [](StoreOptions& of) { of.tables[0].spare = 1; });
}

}  // namespace saving_test
}  // namespace phub::iterstore
