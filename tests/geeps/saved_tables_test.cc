// Local tables are a part of the rank's saved state: jobs whose server is killed, and what a save
// point refuses. The server is a process; the ranks are threads, each with a cache.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/worker_exchange.h"
#include "worker/phub.h"

namespace phub::geeps {
namespace saved_tables_test {

using phub::testing::becomes;
using phub::testing::error_of;
using phub::testing::fresh_seeds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kEvery = 5;
constexpr uint32_t kW = 0, kVelocity = 1, kV = 2, kSeen = 3, kHidden = 4;

std::vector<TableSpec> tables() {
  return {{"w", 64, dense(40)},
          {"velocity", 64, dense(40), true},
          {"v", 32, dense(30)},
          {"seen", 32, dense(30), true},
          {.name = "hidden", .row_floats = 32, .keys = dense(20), .local = true, .scratch = true}};
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.05}};
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  spec.keys = keys_of(tables());
  return spec;
}

// How a cache is used. Results must not depend on it.
struct Way {
  const char* name;
  uint64_t budget_bytes;
  bool records, stream;
  uint32_t partitions = 1;
};
constexpr Way kAllPinned = {"all pinned", 1 << 20, true, false};
constexpr Way kWays[] = {
    kAllPinned,
    {"a part in host memory", 60 << 10, true, false},
    {"on a stream", 60 << 10, true, true, 2},
    {"on a stream, all pinned", 1 << 20, true, true},
    {"no sequence", 1 << 20, false, false},
};

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A training whose updates depend on what its local tables have collected, and on random numbers.
class Program {
 public:
  explicit Program(uint32_t rank) : random_(rank + 1) {}

  uint64_t position() const { return position_; }
  RankState state() const {
    std::ostringstream text;
    text << random_;
    return {{"random", bytes_of(text.str())}, {"position", bytes_of(std::to_string(position_))}};
  }
  void load(const Worker& worker, uint32_t rank) {
    *this = Program(rank);
    const auto saved = worker.restored("random");
    if (!saved) {
      EXPECT_EQ(worker.first_round(), 1u) << "rank " << rank << " got nothing back";
      return;
    }
    std::istringstream(text_of(*saved)) >> random_;
    position_ = std::stoull(text_of(worker.restored("position").value()));
    EXPECT_EQ(position_ + 1, worker.first_round());
    EXPECT_FALSE(worker.restored("geeps/hidden"));
  }

  void train(Cache& cache, Stream* stream) {
    const auto number = [&] { return static_cast<float>(random_() % 1000) / 1000 - 0.5f; };
    const float first = number(), second = number();
    ++position_;
    calls(cache, stream, first, second);
  }
  // The calls of an iteration, which ends with its save point.
  static void calls(Cache& cache, Stream* stream, float first, float second) {
    const auto compute = [&](const float* data, std::function<void()> body) {
      if (data == nullptr) return;  // a virtual iteration
      stream ? stream->call(std::move(body)) : body();
    };
    const std::vector<uint64_t> rows = dense(40);
    {
      const ReadBuffer w(cache, kW, rows);
      const LocalBuffer velocity(cache, kVelocity, rows);
      const LocalBuffer hidden(cache, kHidden, dense(20), Fetch::kNo, Save::kNo);
      UpdateBuffer update(cache, kW, rows);
      compute(w.data(),
              [w = w.data(), v = velocity.data(), h = hidden.data(), u = update.data(), first] {
                std::fill_n(h, 20 * 32, first);
                for (size_t i = 0; i < size_t{40} * 64; ++i) {
                  v[i] = 0.5f * v[i] + 0.1f * w[i] + h[i % 640] * static_cast<float>(i % 13);
                  u[i] = 0.1f * v[i];
                }
              });
      update.update();
    }
    cache.table_clock(kW);
    const std::vector<uint64_t> all = dense(30);
    for (const size_t from : {0u, 10u}) {  // these rows overlap
      const std::span<const uint64_t> part(all.data() + from, 20);
      const LocalBuffer seen(cache, kSeen, part);
      UpdateBuffer update(cache, kV, part);
      compute(seen.data(), [s = seen.data(), u = update.data(), second] {
        for (size_t i = 0; i < size_t{20} * 32; ++i) {
          s[i] = 0.9f * s[i] + second * static_cast<float>(i % 7);
          u[i] = s[i];
        }
      });
      update.update();
    }
    cache.table_clock(kV);
    cache.save_point();
  }

 private:
  std::mt19937_64 random_;
  uint64_t position_ = 0;  // rounds that it has computed
};

// A device, and a cache over a worker.
struct Rig {
  Rig(Worker& worker, const Way& way, const std::vector<TableSpec>& specs = tables())
      : device(make_host_device({.budget_bytes = way.budget_bytes, .poison_copies = true})),
        stream(way.stream ? device->make_stream("compute") : nullptr),
        exchange(worker, specs),
        cache(*device, exchange, specs,
              {.reserved_bytes = 12 << 10,  // for contents()
               .poison = true,
               .partitions = way.partitions,
               .compute = stream.get(),
               .timeout = std::chrono::seconds(120)}) {
    if (!way.records) return;
    cache.begin_virtual();
    Program::calls(cache, stream.get(), 0, 0);
    cache.finish_sequence();
  }

  // What must be the same: parameters, and local rows that are not scratch.
  std::string contents() {
    cache.wait_all();
    std::string all;
    for (size_t key = 0; key < exchange.keys(); ++key) {
      all += text_of(std::as_bytes(exchange.parameters(key)));
    }
    return all + local(kVelocity) + local(kSeen);
  }
  std::string local(uint32_t table) {
    const LocalBuffer rows(cache, table, cache.tables()[table].keys);
    if (stream) stream->synchronize();
    return text_of(std::as_bytes(std::span(rows.data(), rows.buffer().floats())));
  }

  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Stream> stream;
  WorkerExchange exchange;
  Cache cache;
};

class SavedTables : public phub::testing::SavedBoxTest {
 protected:
  SavedTables() : SavedBoxTest(PHUB_BINARY) {}
  // A job of one rank, which saves the round. Not yet over the cache's table.
  std::unique_ptr<Worker> alone(const std::string& name) {
    WorkerOptions mine = options(spec_of(name, 1), 0);
    mine.saver = [this](uint64_t round) {
      if (on_save_) on_save_(round);
      return RankState{{"round", bytes_of(std::to_string(round))}};
    };
    auto worker = std::make_unique<Worker>(mine);
    worker->broadcast({});
    return worker;
  }
  // All ranks in threads, until `rounds` are done, whatever happens to the server; none goes beyond
  // round `allowed`. `anew`: a rank that lost the server begins as a new process would. Returns
  // what each rank has at the end.
  std::vector<std::string> run(const JobSpec& spec, uint64_t rounds,
                               const std::atomic<uint64_t>& allowed, const Way& way, bool anew) {
    std::vector<std::string> results(spec.world_size);
    std::vector<std::jthread> ranks;
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      ranks.emplace_back([&, rank, mine = options(spec, static_cast<int32_t>(rank))]() mutable {
        Program program(rank);
        mine.saver = [&program](uint64_t round) {
          EXPECT_EQ(program.position(), round);
          return program.state();
        };
        through_rewinds(mine, anew, [&](Worker& worker) {
          program.load(worker, rank);
          worker.broadcast({});
          Rig rig(worker, way);
          while (program.position() < rounds) {
            if (program.position() < allowed) {
              program.train(rig.cache, rig.stream.get());
            } else {
              worker.poll();  // notices that the server is gone
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          results[rank] = rig.contents();
          worker.barrier();
          worker.leave();
        });
      });
    }
    return ranks.clear(), results;
  }

  // The same, of a job whose server is killed `kills` times.
  std::vector<std::string> run_and_kill(const JobSpec& spec, uint64_t rounds, const Way& way,
                                        bool anew, int kills, std::mt19937_64& random) {
    std::atomic<uint64_t> allowed = 0;
    std::vector<std::string> results;
    std::jthread training([&] { results = run(spec, rounds, allowed, way, anew); });
    const auto allow = [&](uint64_t round) {
      allowed = std::max<uint64_t>(allowed, std::min(rounds - 1, round));
    };
    uint64_t durable = 0;
    for (int kill = 0; kill < kills; ++kill) {
      EXPECT_TRUE(becomes([&] {
        const JobStatus job = status(spec.name);
        allow(job.next_saved_round + random() % 4);
        return job.durable_round > durable;
      }));
      allow(allowed + random() % 8);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      durable = std::max(durable, status(spec.name).durable_round);
      die_and_come_back(kEvery);
    }
    allowed = rounds;
    training.join();
    return results;
  }

  std::function<void(uint64_t round)> on_save_;
};

TEST_F(SavedTables, ARunWhoseServerIsKilledEndsAsOneThatIsNot) {
  constexpr uint64_t kRounds = 150;
  std::mt19937_64 random(fresh_seeds(1).first);
  serve(kEvery);
  const std::vector<std::string> expected =
      run(spec_of("undisturbed", 2), kRounds, std::atomic<uint64_t>(kRounds), kAllPinned, false);
  ASSERT_FALSE(expected[0].empty());
  ASSERT_NE(expected[0], expected[1]);
  bool anew = random() % 2 == 0;
  for (const Way& way : kWays) {
    anew = !anew;
    SCOPED_TRACE(fmt::format("{}, {}", way.name, anew ? "new processes" : "rejoin"));
    const JobSpec spec = spec_of(fmt::format("killed-{}", &way - kWays), 2);
    const int kills = &way == kWays ? 3 : 1;
    EXPECT_TRUE(run_and_kill(spec, kRounds, way, anew, kills, random) == expected);  // too long
  }
}

// The residuals of coded gradients are saved with the tables.
TEST_F(SavedTables, ResidualsGoOnToo) {
  constexpr uint64_t kRounds = 60;
  std::mt19937_64 random(fresh_seeds(1).first);
  serve(kEvery);
  const auto coded = [](const char* name) {
    JobSpec spec = spec_of(name, 2);
    spec.gradient_dtype = "int8";
    return spec;
  };
  const std::vector<std::string> expected =
      run(coded("coded"), kRounds, std::atomic<uint64_t>(kRounds), kAllPinned, false);
  ASSERT_FALSE(expected[0].empty());
  const bool anew = random() % 2 == 0;
  EXPECT_TRUE(run_and_kill(coded("coded-killed"), kRounds, kWays[1], anew, 1, random) == expected);
  JobSpec alone = coded("no-saver");
  alone.world_size = 1;
  Worker worker(options(alone, 0));
  worker.broadcast({});
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { WorkerExchange refused(worker, tables()); }),
              AllOf(HasSubstr("residuals"), HasSubstr("saver"), HasSubstr("save_point()")));
}

// After every round that is saved the next clock needs the save point.
TEST_F(SavedTables, AClockBeforeTheSavePointIsRefused) {
  serve(2);
  const auto worker = alone("refused");
  Rig rig(*worker, kAllPinned);
  const auto clock_all = [&] {
    for (const uint32_t table : {kW, kV}) {
      UpdateBuffer update(rig.cache, table, rig.cache.tables()[table].keys);
      std::ranges::fill(std::span(update.data(), update.buffer().floats()), 1.0f);
      update.update();
      rig.cache.table_clock(table);
    }
  };
  clock_all();
  clock_all();  // round 1 is not saved
  const std::vector<uint64_t> rows = dense(40);
  {
    UpdateBuffer update(rig.cache, kW, rows);
    std::ranges::fill(std::span(update.data(), update.buffer().floats()), 1.0f);
    EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { rig.cache.save_point(); }),
                AllOf(HasSubstr("buffer of 'w'")));
    update.update();
  }
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { rig.cache.table_clock(kW); }),
              AllOf(HasSubstr("'w'"), HasSubstr("clock 2"), HasSubstr("save_point()")));
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { rig.cache.save_point(); }),
              AllOf(HasSubstr("updates of 'w'"), HasSubstr("not clocked")));
}

TEST_F(SavedTables, LocalRowsMustNotBeInUse) {
  serve(1);
  const auto worker = alone("in-use");
  int saved = 0;
  on_save_ = [&](uint64_t) { ++saved; };
  Rig rig(*worker, kAllPinned);
  const auto clocks = [&] {
    for (const uint32_t table : {kW, kV}) {
      const ReadBuffer rows(rig.cache, table, dense(30));
      rig.cache.table_clock(table);
    }
  };
  clocks();
  {
    const ReadBuffer may_be(rig.cache, kW, dense(40));
    {
      const LocalBuffer rows(rig.cache, kSeen, dense(30));
      EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { rig.cache.save_point(); }),
                  HasSubstr("buffer of 'seen'"));
    }
    EXPECT_EQ(saved, 0);
    rig.cache.save_point();
  }
  EXPECT_EQ(saved, 1);
  rig.cache.save_point();  // once is enough
  EXPECT_EQ(saved, 1);
  // A saver's error is that of its save point only.
  clocks();
  on_save_ = [](uint64_t round) { fail(ErrorCode::kInternal, "cannot save round {}", round); };
  EXPECT_THAT(error_of(ErrorCode::kInternal, [&] { rig.cache.save_point(); }),
              HasSubstr("cannot save round 2"));
  on_save_ = [&](uint64_t) { ++saved; };
  clocks();
  rig.cache.save_point();
  EXPECT_EQ(saved, 2);
}

// What pushes past the cache's check is refused by the worker.
TEST_F(SavedTables, APushBeforeTheSaveIsRefused) {
  serve(1);
  const auto worker = alone("push");
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { worker->save({}); }), HasSubstr("by calls"));
  {
    WorkerExchange exchange(*worker, tables());
    EXPECT_EQ(exchange.saved_after(0), 1u);
    const auto round = [&] {
      for (const size_t key : {0, 1}) exchange.push_null(key);
    };
    round();
    exchange.next();
    EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { exchange.save({}); }), HasSubstr("1 keys"));
    exchange.next();
    EXPECT_THAT(error_of(ErrorCode::kInvalid,
                         [&] {
                           exchange.save({{"round", {}}});
                         }),
                HasSubstr("'round'"));
    EXPECT_EQ(exchange.saved_after(1), 2u);  // the round is left out
    round();
    for (int i = 0; i < 2; ++i) exchange.next();
    EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { exchange.push_null(1); }),
                AllOf(HasSubstr("round 3"), HasSubstr("save() of the state after round 2")));
  }
  // Without an exchange the worker calls the saver itself again.
  std::vector<uint64_t> rounds;
  on_save_ = [&](uint64_t round) { rounds.push_back(round); };
  for (int i = 0; i < 2; ++i) {
    for (const size_t key : {0, 1}) worker->push_null(key);
    worker->wait_all();
  }
  EXPECT_EQ(rounds, (std::vector<uint64_t>{3, 4}));
}

TEST_F(SavedTables, WhatIsTooLargeIsRefusedAtTheBeginning) {
  serve(1);
  const auto worker = alone("large");
  std::vector<TableSpec> large = tables();
  large.push_back({"large", 1024, dense(16 << 10), true});  // 64 MiB
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  {
    WorkerExchange exchange(*worker, large);
    EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { Cache(*device, exchange, large); }),
                AllOf(HasSubstr("67122944 bytes"), HasSubstr("67108864"), HasSubstr("scratch")));
  }
  large.back().scratch = true;
  WorkerExchange exchange(*worker, large);
  const Cache cache(*device, exchange, large);
}

TEST_F(SavedTables, AGroupOfDevicesCannotBeSaved) {
  serve(1);
  const auto worker = alone("group");
  WorkerExchange exchange(*worker, tables());
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { DeviceGroup(exchange, {.members = 2}); }),
              HasSubstr("a group of 2 devices over a worker with a saver"));
  DeviceGroup group(exchange, {.members = 1});
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, group.member(0), tables());
  int saved = 0;
  on_save_ = [&](uint64_t) { ++saved; };
  for (const uint32_t table : {kW, kV}) cache.table_clock(table);
  cache.save_point();
  EXPECT_EQ(saved, 1);
}

TEST_F(SavedTables, OtherRowsThanThoseThatWereSavedAreRefused) {
  serve(1);
  auto worker = alone("other");
  {
    Rig rig(*worker, kAllPinned);
    Program program(0);
    ASSERT_TRUE(becomes([&] {
      program.train(rig.cache, nullptr);
      return status("other").durable_round > 0;
    }));
    die_and_come_back(1);
    EXPECT_NE(error_of(ErrorCode::kRewound,
                       [&] {
                         for (;;) program.train(rig.cache, nullptr);
                       }),
              "");
  }
  worker = worker->rejoin();
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  const auto refusal = [&](const std::function<void(TableSpec&)>& change) {
    std::vector<TableSpec> other = tables();
    change(other[kSeen]);
    WorkerExchange exchange(*worker, other);
    return error_of(ErrorCode::kMismatch, [&] { Cache(*device, exchange, other); });
  };
  EXPECT_THAT(refusal([](TableSpec& table) { std::swap(table.keys[0], table.keys[1]); }),
              HasSubstr("'seen' was saved with other rows"));
  EXPECT_THAT(refusal([](TableSpec& table) { table.keys.pop_back(); }), HasSubstr("29 rows"));
  // As scratch, or under another name, it begins anew.
  std::vector<TableSpec> other = tables();
  other[kSeen].scratch = true;
  Rig rig(*worker, kAllPinned, other);
  EXPECT_EQ(rig.local(kSeen), std::string(size_t{30} * 32 * sizeof(float), '\0'));
  EXPECT_NE(rig.local(kVelocity), std::string(size_t{40} * 64 * sizeof(float), '\0'));
}

// --- over the C interface ------------------------------------------------------------------------

phub_code save_clock(void* user_data, uint64_t round, phub_state* state) {
  *static_cast<uint64_t*>(user_data) = round;
  return phub_save(state, "round", &round, sizeof round);
}

class OverC {
 public:
  explicit OverC(const std::string& server) {
    ok(phub_geeps_options_create(&tables_));
    ok(phub_geeps_options_add_table(tables_, "w", 8, nullptr, 4));
    ok(phub_geeps_options_add_local(tables_, "sum", 8, nullptr, 4));
    ok(phub_geeps_options_add_local(tables_, "scratch", 8, nullptr, 4));
    ok(phub_geeps_options_set_scratch(tables_, 2));
    for (const uint32_t wrong : {0u, 3u}) {
      EXPECT_EQ(phub_geeps_options_set_scratch(tables_, wrong), PHUB_INVALID);
    }
    ok(phub_options_create(&options_));
    ok(phub_options_set(options_, "server", server.c_str()));
    ok(phub_options_set(options_, "job", "c"));
    ok(phub_options_set(options_, "optimizer", "sgd"));
    if (const char* transport = std::getenv("PHUB_TRANSPORT")) {
      ok(phub_options_set(options_, "transport", transport));
    }
    ok(phub_options_add_tables(options_, tables_));
    ok(phub_options_set_saver(options_, save_clock, &saved));
    ok(phub_worker_create(options_, &worker_));
    ok(phub_device_open_host(1 << 16, 0, 0, &device_));
    open();
  }
  ~OverC() {
    ok(phub_geeps_destroy(geeps_));
    ok(phub_worker_destroy(worker_));
    ok(phub_device_close(device_));
    ok(phub_options_destroy(options_));
    ok(phub_geeps_options_destroy(tables_));
  }
  OverC(const OverC&) = delete;
  OverC& operator=(const OverC&) = delete;

  // Adds one to every local row, also to those that are not saved. Any call may be the first that
  // sees the box's death.
  phub_code train() {
    for (const uint32_t table : {1u, 2u}) {
      phub_buffer rows = buffer();
      phub_code code = phub_geeps_local_access(geeps_, table, nullptr, 0, 1, &rows);
      if (code != PHUB_OK) return code;
      for (int i = 0; i < 32; ++i) rows.data[i] += 1;
      code = phub_geeps_post_local_access(geeps_, rows.handle, 1);
      if (code != PHUB_OK) return code;
    }
    phub_buffer parameters = buffer();
    phub_code code = phub_geeps_read(geeps_, 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &parameters);
    if (code != PHUB_OK) return code;
    code = phub_geeps_post_read(geeps_, parameters.handle);
    if (code == PHUB_OK) code = phub_geeps_table_clock(geeps_, 0);
    return code == PHUB_OK ? phub_geeps_save_point(geeps_) : code;
  }
  uint64_t rejoin() {
    uint64_t first_round = 0;
    ok(phub_geeps_destroy(geeps_));
    ok(phub_rejoin(worker_, &first_round));
    open();
    return first_round;
  }
  float first_of(uint32_t table) {
    phub_buffer rows = buffer();
    ok(phub_geeps_local_access(geeps_, table, nullptr, 0, 1, &rows));
    const float first = rows.data[0];
    ok(phub_geeps_post_local_access(geeps_, rows.handle, 1));
    return first;
  }
  uint64_t saved = 0;

 private:
  static void ok(phub_code code) { EXPECT_EQ(code, PHUB_OK) << phub_last_error(); }
  static phub_buffer buffer() {
    phub_buffer buffer = {};
    buffer.size = sizeof buffer;
    return buffer;
  }
  void open() { ok(phub_geeps_create(device_, worker_, tables_, &geeps_)); }

  phub_geeps_options* tables_ = nullptr;
  phub_options* options_ = nullptr;
  phub_worker* worker_ = nullptr;
  phub_device* device_ = nullptr;
  phub_geeps* geeps_ = nullptr;
};

TEST_F(SavedTables, OverTheCInterface) {
  serve(2);
  OverC program(server_->address());
  ASSERT_TRUE(becomes([&] { return program.train() == PHUB_OK && status("c").durable_round > 0; }));
  EXPECT_EQ(program.saved % 2, 0u);
  die_and_come_back(2);
  EXPECT_TRUE(becomes([&] { return program.train() == PHUB_REWOUND; }));
  const uint64_t first_round = program.rejoin();
  EXPECT_GT(first_round, 1u);
  EXPECT_EQ(program.first_of(1), static_cast<float>(first_round - 1));
  EXPECT_EQ(program.first_of(2), 0);
}

}  // namespace saved_tables_test
}  // namespace phub::geeps
