// Local tables by branch in jobs of a whole box, in C++ and in C, and what is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"
#include "worker/geeps/worker_exchange.h"
#include "worker/phub.h"

namespace phub::geeps {
namespace branch_jobs_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kW = 0, kSum = 1, kCount = 2, kBias = 3;
constexpr uint32_t kRanks = 2;

std::vector<TableSpec> tables() {
  return {{"w", 16, dense(20)},
          {.name = "sum", .row_floats = 16, .keys = dense(20), .local = true, .by_branch = true},
          {.name = "count", .row_floats = 1, .keys = dense(4), .local = true},
          {"bias", 3, dense(2)}};
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.branches = 2;
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 1}};
  spec.initial = "zeros";
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.keys = keys_of(tables());
  return spec;
}

// Sums of small whole numbers: all are exact.
struct Model {
  float w = 0;
  std::array<float, kRanks> sums = {};  // by rank: of all w that it has seen
  float lr = 1;
};

// Clocks tables of parameters. Only one that was used since can be.
void clock(Cache& cache, const std::vector<uint32_t>& of = {kW, kBias}) {
  for (const uint32_t table : of) {
    { const ReadBuffer rows(cache, table, dense(1)); }
    cache.table_clock(table);
  }
}

// Each rank adds w to its sums, and its number and one to the gradient.
struct Step {
  float w = 0, sum = 0, count = 0;  // before it
};
Step step_of(Cache& cache, uint32_t rank, bool virtually = false) {
  Step step;
  const std::vector<TableSpec> specs = tables();
  {
    const ReadBuffer w(cache, kW, specs[kW].keys);
    const LocalBuffer sum(cache, kSum, specs[kSum].keys);
    const LocalBuffer count(cache, kCount, specs[kCount].keys);
    UpdateBuffer update(cache, kW, specs[kW].keys);
    if (!virtually) {
      const auto same = [](const float* data, size_t n) {
        EXPECT_EQ(std::count(data, data + n, data[0]), static_cast<ptrdiff_t>(n));
        return data[0];
      };
      step = {same(w.data(), 320), same(sum.data(), 320), same(count.data(), 4)};
      for (float& each : std::span(sum.data(), 320)) each += step.w;
      for (float& each : std::span(count.data(), 4)) each += 1;
      std::fill_n(update.data(), 320, static_cast<float>(rank + 1));
    }
    update.update();
  }
  clock(cache);
  cache.save_point();
  return step;
}

struct Way {
  const char* name;
  uint64_t budget_bytes;
  bool records, prefetch;
  uint32_t partitions;
};
constexpr Way kWays[] = {{"all pinned", 1 << 20, true, true, 1},
                         {"tight", 10 << 10, true, true, 2},
                         {"tight, no prefetch", 10 << 10, true, false, 1},
                         {"no sequence", 1 << 20, false, true, 3}};

// What rank 0 decided, for all to look up.
struct Plan {
  bool child_stays = false;
  std::mutex mutex;
  uint64_t forked = ~uint64_t{0}, scheduled = ~uint64_t{0};
  uint32_t child = 0;

  // The child runs for two rounds, its parent for three, then one of each, then the child, if it
  // stays.
  uint32_t branch_in(uint64_t round) const {
    if (round < scheduled) return 0;
    constexpr std::array<bool, 7> kIsChild = {true, true, false, false, false, true, false};
    const uint64_t at = round - scheduled;
    return (at < kIsChild.size() ? kIsChild.at(at) : child_stays) ? child : 0;
  }
};

void decide(Worker& worker, Plan& plan) {
  const std::lock_guard lock(plan.mutex);
  const BranchReply fork = worker.fork(0, {{"lr", 2}});
  const uint32_t child = fork.branch;
  std::vector<BranchTurn> turns = {{child, 2}, {0, 3}, {child, 1}, {0, 0}};
  if (plan.child_stays) turns = {{child, 2}, {0, 3}, {child, 1}, {0, 1}, {child, 0}};
  plan.scheduled = worker.schedule(turns, fork.round + 2);
  if (!plan.child_stays) worker.discard(child);  // after its turns, which are still to come
  plan.forked = fork.round;
  plan.child = fork.branch;
}

// A rank, or a device of a group, reads in each round what the branch that runs has.
void train(Cache& cache, uint32_t rank, Worker& worker, Plan& plan) {
  std::map<uint32_t, Model> models = {{0, {}}};
  for (uint64_t round = 1; round <= 24; ++round) {
    if (rank == 0 && round == 3) decide(worker, plan);
    uint32_t branch = 0;
    {
      const std::lock_guard lock(plan.mutex);
      if (round == plan.forked) {
        models[plan.child] = models.at(0);
        models[plan.child].lr = 2;
      }
      branch = plan.branch_in(round);
    }
    Model& model = models.at(branch);
    const Step step = step_of(cache, rank);
    ASSERT_EQ(step.w, model.w) << "round " << round;
    ASSERT_EQ(step.sum, model.sums[rank]) << "round " << round;
    ASSERT_EQ(step.count, static_cast<float>(round - 1));  // it is not by branch
    model.sums[rank] += model.w;
    model.w -= model.lr * (kRanks * (kRanks + 1) / 2);
  }
  EXPECT_GT(plan.child, 0u);
}

TEST(BranchJobs, EveryRanksTablesAreThoseOfTheBranchThatRuns) {
  Box box;
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    Plan plan;
    const JobSpec spec = spec_of(fmt::format("job-{}", &way - kWays), kRanks);
    each_rank(kRanks, [&](uint32_t rank) {
      WorkerOptions options = box.options(spec);
      options.rank = static_cast<int32_t>(rank);
      Worker worker(options);
      const auto device = make_host_device({.budget_bytes = way.budget_bytes});
      WorkerExchange exchange(worker, tables());
      Cache cache(*device, exchange, tables(),
                  {.reserved_bytes = 5 << 10,
                   .prefetch = way.prefetch,
                   .partitions = way.partitions,
                   .timeout = std::chrono::seconds(60)});
      if (way.records) {
        cache.begin_virtual();
        step_of(cache, rank, true);
        cache.finish_sequence();
      }
      train(cache, rank, worker, plan);
      worker.barrier();
      cache.wait_all();
    });
  }
}

// A device of a group changes over at its own save point.
TEST(BranchJobs, EachDeviceOfAGroupHasTables) {
  Box box;
  Plan plan;
  Worker worker(box.options(spec_of("group", 1)));
  WorkerExchange exchange(worker, tables());
  DeviceGroup group(exchange, {.members = kRanks});
  each_rank(kRanks, [&](uint32_t member) {
    const auto device = make_host_device({.budget_bytes = 1 << 20});
    Cache cache(*device, group.member(member), tables(), {.timeout = std::chrono::seconds(60)});
    train(cache, member, worker, plan);
  });
}

// A fork costs an index; rows cost memory when they are written, until the branch is discarded.
TEST(BranchJobs, RowsAreCountedFromTheirFirstWriteOn) {
  Box box;
  Worker worker(box.options(spec_of("bytes", 1)));
  WorkerExchange exchange(worker, tables());
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, exchange, tables());
  const auto round = [&](const std::vector<uint64_t>& rows) {
    if (!rows.empty()) {
      const LocalBuffer sum(cache, kSum, rows);
      std::fill_n(sum.data(), 16 * rows.size(), 1.0F);
    }
    clock(cache);
    cache.save_point();
    return cache.stats().branch_bytes;
  };
  constexpr uint64_t kIndex = 20 * 4, kRow = 64 + 24;
  EXPECT_EQ(round({1, 2, 3}), 0u);
  const BranchReply fork = worker.fork(0);
  while (worker.round(0) + 1 < fork.round) round({});
  EXPECT_EQ(round({}), kIndex);
  EXPECT_EQ(round({3, 7}), kIndex + 2 * kRow);
  EXPECT_EQ(round({7, 8, 9}), kIndex + 4 * kRow);
  const uint64_t gone = worker.discard(fork.branch);
  while (worker.round(0) + 1 < gone) round({});
  EXPECT_EQ(round({}), 0u);
}

class SavedBranches : public phub::testing::SavedBoxTest {
 protected:
  SavedBranches() : SavedBoxTest(PHUB_BINARY) {}
};

// The server is killed when a checkpoint has both branches, and the child runs.
TEST_F(SavedBranches, ARestoredRankHasTheRowsOfAllBranches) {
  constexpr uint64_t kEvery = 3;
  serve(kEvery);
  const JobSpec spec = spec_of("saved", 1);
  WorkerOptions mine = options(spec, 0);
  mine.saver = [](uint64_t) { return RankState(); };
  auto worker = std::make_unique<Worker>(mine);
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  std::optional<WorkerExchange> exchange;
  std::optional<Cache> cache;
  const auto open = [&] {
    exchange.emplace(*worker, tables());
    cache.emplace(*device, *exchange, tables(), CacheOptions{.budget_bytes = 64 << 10});
  };
  open();
  Plan plan{.child_stays = true};
  std::map<uint64_t, std::map<uint32_t, Model>> before = {{1, {{0, {}}}}};  // by round
  uint64_t round = 1, back = ~uint64_t{0};  // branch 0 runs again from `back` on
  const auto train = [&] {
    std::map<uint32_t, Model> models = before.at(round);
    if (round == plan.forked) {
      models[plan.child] = models.at(0);
      models[plan.child].lr = 2;
    }
    Model& model = models.at(round >= back ? 0 : plan.branch_in(round));
    const Step step = step_of(*cache, 0);
    EXPECT_EQ(step.w, model.w) << "round " << round;
    EXPECT_EQ(step.sum, model.sums[0]) << "round " << round;
    model.sums[0] += model.w;
    model.w -= model.lr;
    before[++round] = models;
  };
  while (round < 3) train();
  decide(*worker, plan);
  while (round < plan.scheduled + 8) train();
  ASSERT_TRUE(becomes_status("saved", [&](const JobStatus& status) {
    train();
    return status.durable_round > plan.scheduled + 8;
  }));
  die_and_come_back(kEvery);
  try {
    for (int i = 0; i < 100; ++i) train();
    FAIL() << "nobody noticed";
  } catch (const Error& error) {
    ASSERT_EQ(error.code(), ErrorCode::kRewound) << error.what();
  }
  cache.reset();
  exchange.reset();
  worker = worker->rejoin();
  round = worker->first_round();
  ASSERT_GT(round, plan.scheduled + 8);
  open();
  for (int i = 0; i < 3; ++i) train();
  const BranchTurn again[] = {{0, 0}};
  back = worker->schedule(again);
  for (int i = 0; i < 6; ++i) train();
  EXPECT_GT(cache->stats().branch_bytes, 0u);
}

TEST_F(SavedBranches, ASaversErrorIsThatOfItsSavePointAlone) {
  serve(1);
  WorkerOptions mine = options(spec_of("failing", 1), 0);
  int calls = 0;
  mine.saver = [&calls](uint64_t round) {
    if (++calls == 1) fail(ErrorCode::kInternal, "cannot save round {}", round);
    return RankState();
  };
  Worker worker(mine);
  WorkerExchange exchange(worker, tables());
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, exchange, tables(), CacheOptions{.budget_bytes = 64 << 10});
  int errors = 0;
  for (int i = 0; i < 100 && calls < 3; ++i) {
    clock(cache);
    try {
      cache.save_point();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("cannot save round"));
      ++errors;
    }
  }
  EXPECT_EQ(errors, 1);
  EXPECT_GE(calls, 3);
}

TEST(BranchJobs, AnIterationEndsWithItsSavePoint) {
  Box box;
  Worker worker(box.options(spec_of("ends", 1)));
  WorkerExchange exchange(worker, tables());
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, exchange, tables());
  cache.save_point();  // nothing was clocked
  clock(cache, {kW});
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { cache.save_point(); }),
              AllOf(HasSubstr("'bias'"), HasSubstr("save_point")));
  clock(cache, {kBias});
  const uint64_t handle = cache.local_access(kCount, dense(1)).handle;
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { cache.save_point(); }), HasSubstr("'count'"));
  cache.discard(handle);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { clock(cache, {kBias}); }),
              AllOf(HasSubstr("'bias'"), HasSubstr("by branch"), HasSubstr("save_point")));
  cache.save_point();
  clock(cache, {kBias});
}

TEST(BranchJobs, AJobWithoutBranchesNeedsNoSavePoint) {
  JobSpec job = spec_of("without", 1);
  job.branches = 0;
  StandaloneExchange exchange(job);
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, exchange, tables());
  for (int i = 0; i < 3; ++i) clock(cache);
  cache.save_point();
}

TEST(BranchJobs, OnlyLocalDataThatIsKeptIsByBranch) {
  for (const uint32_t table : {kW, kSum}) {
    std::vector<TableSpec> specs = tables();
    specs[table].by_branch = true;
    specs[table].scratch = specs[table].local;
    EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { (void)keys_of(specs); }),
                AllOf(HasSubstr(fmt::format("'{}'", specs[table].name)), HasSubstr("by branch"),
                      HasSubstr(specs[table].local ? "scratch" : "parameters")));
  }
}

// --- over the C interface ------------------------------------------------------------------------

void ok(phub_code code) { ASSERT_EQ(code, PHUB_OK) << phub_last_error(); }

TEST(BranchJobs, OverTheCInterface) {
  Box box;
  phub_geeps_options* tables = nullptr;
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  phub_device* device = nullptr;
  phub_geeps* geeps = nullptr;
  ok(phub_geeps_options_create(&tables));
  ok(phub_geeps_options_add_table(tables, "w", 4, nullptr, 4));
  ok(phub_geeps_options_add_local(tables, "rounds", 4, nullptr, 4));
  ok(phub_geeps_options_set_by_branch(tables, 1));
  for (const uint32_t wrong : {0U, 2U}) {
    EXPECT_EQ(phub_geeps_options_set_by_branch(tables, wrong), PHUB_INVALID);
  }
  ok(phub_options_create(&options));
  ok(phub_options_set(options, "server", box.address().c_str()));
  ok(phub_options_set(options, "job", "c"));
  ok(phub_options_set(options, "optimizer", "sgd"));
  ok(phub_options_set(options, "branches", "1"));
  if (const char* transport = std::getenv("PHUB_TRANSPORT")) {
    ok(phub_options_set(options, "transport", transport));
  }
  ok(phub_options_add_tables(options, tables));
  ok(phub_worker_create(options, &worker));
  ok(phub_device_open_host(1 << 16, 0, 0, &device));
  ok(phub_geeps_create(device, worker, tables, &geeps));
  // Adds one to what the branch has, and returns what it was.
  uint64_t round = 0;
  const auto train = [&] {
    phub_buffer rows = {};
    rows.size = sizeof rows;
    EXPECT_EQ(phub_geeps_local_access(geeps, 1, nullptr, 0, 1, &rows), PHUB_OK);
    const float before = rows.data[5];
    for (int i = 0; i < 16; ++i) rows.data[i] += 1;
    EXPECT_EQ(phub_geeps_post_local_access(geeps, rows.handle, 1), PHUB_OK);
    phub_buffer w = {};
    w.size = sizeof w;
    EXPECT_EQ(phub_geeps_read(geeps, 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &w), PHUB_OK);
    EXPECT_EQ(phub_geeps_post_read(geeps, w.handle), PHUB_OK);
    EXPECT_EQ(phub_geeps_table_clock(geeps, 0), PHUB_OK);
    EXPECT_EQ(phub_geeps_save_point(geeps), PHUB_OK) << phub_last_error();
    ++round;
    return before;
  };
  EXPECT_EQ(train(), 0);
  uint64_t forked = 0, scheduled = 0;
  uint32_t child = 0;
  ok(phub_fork(worker, 0, nullptr, nullptr, 0, &forked, &child));
  scheduled = forked + 2;
  const std::array<uint32_t, 2> branches = {child, 0};
  const std::array<uint64_t, 2> rounds = {3, 0};
  ok(phub_schedule(worker, branches.data(), rounds.data(), 2, &scheduled));
  while (round + 1 < scheduled) {
    const auto before = static_cast<float>(round);
    EXPECT_EQ(train(), before);
  }
  phub_geeps_counters counters = {};
  counters.size = sizeof counters;
  ok(phub_geeps_stats(geeps, &counters));
  EXPECT_EQ(counters.branch_bytes, 4 * (4 + 16 + 24u));  // a place, a row, and what it takes
  for (int i = 0; i < 3; ++i) EXPECT_EQ(train(), static_cast<float>(forked - 1 + i));
  EXPECT_EQ(train(), static_cast<float>(scheduled - 1));
  ok(phub_geeps_destroy(geeps));
  ok(phub_worker_destroy(worker));
  ok(phub_device_close(device));
  ok(phub_options_destroy(options));
  ok(phub_geeps_options_destroy(tables));
}

}  // namespace branch_jobs_test
}  // namespace phub::geeps
