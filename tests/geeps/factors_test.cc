// Tables whose updates are factors, from caches on the devices of all processes to the box: the
// bits of a job of plain workers that send the same pairs, in the order of ranks and devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/geeps/exchange_rig.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::geeps {
namespace factors_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::error_of;
using ::testing::HasSubstr;
using testing::Parameters;
using testing::parameters_of;
using testing::same_bits;

constexpr uint64_t kRounds = 7;
constexpr uint32_t kSamples = 3;
constexpr size_t kRows = 70, kColumns = 48;

std::vector<TableSpec> tables() {
  return {{.name = "matrix", .row_floats = kColumns, .keys = dense(kRows), .samples = kSamples},
          {.name = "bias", .row_floats = kRows, .keys = dense(1)},
          {.name = "errors", .row_floats = kRows, .keys = dense(kSamples), .local = true}};
}

JobSpec spec_of(const std::string& name, uint32_t ranks, uint32_t devices,
                const std::string& consistency = "bsp") {
  JobSpec spec;
  spec.name = name;
  spec.keys = keys_of(tables(), devices);
  spec.world_size = ranks;
  spec.optimizer = "adam";
  spec.reduction = "sum";
  spec.consistency = consistency;
  spec.hyper = {{"lr", 0.01}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// What a device has of a round: the errors of some samples, and their inputs.
struct Batch {
  Batch(uint64_t seed, uint32_t rank, uint32_t device, uint64_t round) {
    std::mt19937_64 random(seed + 1000 * round + 10 * rank + device);
    pairs = static_cast<uint32_t>(random() % (kSamples + 1));
    for (uint32_t i = 0; i < pairs * kRows; ++i) errors.push_back(value(random));
    for (uint32_t i = 0; i < pairs * kColumns; ++i) inputs.push_back(value(random));
  }
  static float value(std::mt19937_64& random) {
    return static_cast<float>(random() % 2001) / 1000 - 1;
  }
  // The gradient of the bias: the sum of the errors.
  std::vector<float> bias() const {
    std::vector<float> sum(kRows);
    for (uint32_t p = 0; p < pairs; ++p) {
      for (size_t i = 0; i < kRows; ++i) sum[i] += errors[p * kRows + i];
    }
    return sum;
  }
  uint32_t pairs = 0;
  std::vector<float> errors, inputs;
};

// Without a cache: one worker for each process, which sends the pairs of all devices.
Parameters plain(const Box& box, uint64_t seed, const JobSpec& spec, uint32_t devices) {
  const uint32_t ranks = spec.world_size;
  Parameters out(2);
  each_rank(ranks, [&](uint32_t rank) {
    Worker worker(testing::options_of(box, spec, rank));
    for (uint64_t round = 1; round <= kRounds; ++round) {
      std::vector<Batch> batches;
      std::vector<FactorPairs> factors;
      for (uint32_t d = 0; d < devices; ++d) batches.emplace_back(seed, rank, d, round);
      for (const Batch& batch : batches) {
        factors.push_back({batch.errors.data(), batch.inputs.data(), batch.pairs});
      }
      worker.push_factors(0, factors, {});
      std::vector<float> sum = batches[0].bias();
      for (uint32_t d = 1; d < devices; ++d) {
        const std::vector<float> bias = batches[d].bias();
        for (size_t i = 0; i < kRows; ++i) sum[i] += bias[i];
      }
      std::ranges::copy(sum, worker.gradient(1).begin());
      worker.push(1);
      worker.wait_all();
    }
    if (rank == 0) {
      for (size_t key = 0; key < 2; ++key) {
        out[key].assign(worker.parameters(key).begin(), worker.parameters(key).end());
      }
    }
    worker.leave();
  });
  return out;
}

std::unique_ptr<HostDevice> slow_device() {
  return make_host_device({.name = "slow",
                           .budget_bytes = 4 << 20,
                           .copy_bytes_per_second = 1e9,
                           .copy_latency = std::chrono::microseconds(100),
                           .poison_copies = true});
}

// One device's training. With a stream, all is enqueued, and the batch's memory is poisoned behind
// the clock: the cache has taken it by then.
void train(Exchange& exchange, uint64_t seed, uint32_t rank, uint32_t number, bool in_stream) {
  const auto device = slow_device();
  const auto stream = device->make_stream("compute");
  const DeviceMemory inputs(*device, kSamples * kColumns * sizeof(float), "inputs");
  const DeviceMemory errors(*device, kSamples * kRows * sizeof(float), "errors");
  const HostMemory staged(
      *device, kRounds * (inputs.bytes() + errors.bytes() + kRows * sizeof(float)), "batches");
  float* place = staged.floats().data();
  {
    Cache cache(*device, exchange, tables(),
                {.budget_bytes = 1 << 20,
                 .partitions = number + 1,
                 .compute = in_stream ? stream.get() : nullptr});
    const auto iterate = [&](uint64_t round) {
      const Batch batch(seed, rank, number, round);
      const auto copy = [&](float* to, const std::vector<float>& from) {
        if (from.empty()) return;
        std::ranges::copy(from, place);
        stream->copy_to_device(to, place, from.size() * sizeof(float));
        if (!in_stream) stream->synchronize();
        place += from.size();
      };
      { const ReadBuffer weights(cache, 0, dense(kRows)); }
      if (round > 0) {
        copy(errors.floats(), batch.errors);
        copy(inputs.floats(), batch.inputs);
      }
      if (round > 0 && batch.pairs > 1) {  // in two parts
        const FactorPairs parts[] = {
            {errors.floats(), inputs.floats(), 1},
            {errors.floats() + kRows, inputs.floats() + kColumns, batch.pairs - 1}};
        cache.table_clock(0, parts);
      } else {
        const FactorPairs all{errors.floats(), inputs.floats(), batch.pairs};
        cache.table_clock(0, {&all, 1});
      }
      stream->fill(errors.floats(), std::numeric_limits<float>::quiet_NaN(), kSamples * kRows);
      if (!in_stream) stream->synchronize();
      { const ReadBuffer bias(cache, 1, dense(1)); }
      UpdateBuffer update(cache, 1, dense(1));
      if (round > 0) copy(update.data(), batch.bias());
      update.update();
      cache.table_clock(1);
    };
    cache.begin_virtual();
    iterate(0);
    cache.finish_sequence();
    for (uint64_t round = 1; round <= kRounds; ++round) iterate(round);
    cache.wait_all();
  }
}

TEST(Factors, ThreeLevelsOfThemAreThoseOfPlainWorkers) {
  const uint64_t seed = phub::testing::fresh_seeds(1).first;
  SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed);
  Box box;
  for (const uint32_t devices : {1u, 2u, 3u}) {
    const Parameters want =
        plain(box, seed, spec_of("plain" + std::to_string(devices), 2, devices), devices);
    for (const bool in_stream : {false, true}) {
      const JobSpec spec = spec_of(
          "caches" + std::to_string(devices) + (in_stream ? "stream" : "thread"), 2, devices);
      each_rank(2, [&](uint32_t rank) {
        Worker worker(testing::options_of(box, spec, rank));
        {
          WorkerExchange exchange(worker, tables());
          DeviceGroup group(exchange, {.members = devices});
          each_rank(devices, [&](uint32_t d) { train(group.member(d), seed, rank, d, in_stream); });
          EXPECT_TRUE(same_bits(parameters_of(exchange), want))
              << devices << " devices, rank " << rank << (in_stream ? ", on a stream" : "");
        }
        worker.leave();
      });
    }
  }
}

TEST(Factors, WithoutABoxTheyAreThoseOfOneWorker) {
  const uint64_t seed = phub::testing::fresh_seeds(1).first;
  SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed);
  Box box;
  for (const char* consistency : {"bsp", "async"}) {
    const Parameters want = plain(box, seed, spec_of(consistency, 1, 2, consistency), 2);
    StandaloneExchange exchange(spec_of("alone", 1, 2, consistency));
    DeviceGroup group(exchange, {.members = 2});
    each_rank(2, [&](uint32_t d) { train(group.member(d), seed, 0, d, true); });
    EXPECT_TRUE(same_bits(parameters_of(exchange), want)) << consistency;
  }
}

// Enqueued as fast as the application can. Clock r adds r to every element.
TEST(Factors, EveryClockHasItsOwn) {
  constexpr uint32_t kClocks = 30;
  const std::vector<TableSpec> matrix = {tables()[0]};
  JobSpec spec = spec_of("clocks", 1, 1, "async");
  spec.keys = keys_of(matrix);
  spec.optimizer = "none";
  spec.hyper = {};
  StandaloneExchange exchange(spec);
  const auto device = slow_device();
  const auto stream = device->make_stream("compute");
  const DeviceMemory factors(*device, (kRows + kColumns) * sizeof(float), "factors");
  {
    Cache cache(*device, exchange, matrix, {.budget_bytes = 1 << 20, .compute = stream.get()});
    const auto iterate = [&](uint32_t clock) {
      { const ReadBuffer weights(cache, 0, dense(kRows)); }
      stream->fill(factors.floats(), static_cast<float>(clock), kRows);
      stream->fill(factors.floats() + kRows, 1.0f, kColumns);
      const FactorPairs pair{factors.floats(), factors.floats() + kRows, 1};
      cache.table_clock(0, {&pair, 1});
    };
    cache.begin_virtual();
    iterate(0);
    cache.finish_sequence();
    for (uint32_t clock = 1; clock <= kClocks; ++clock) iterate(clock);
    cache.wait_all();
  }
  const std::vector<float> want(kRows * kColumns, kClocks * (kClocks + 1) / 2.0f);
  EXPECT_TRUE(std::ranges::equal(exchange.parameters(0), want));
}

TEST(Factors, WrongCallsAreRefusedAndChangeNothing) {
  const auto device = make_host_device({.name = "dev", .budget_bytes = 4 << 20});
  const DeviceMemory memory(*device, 4 * kRows * sizeof(float), "factors");
  const float* const here = memory.floats();
  const std::vector<float> host(4 * kRows);
  StandaloneExchange exchange(spec_of("wrong", 1, 1));
  Cache cache(*device, exchange, tables(), {.budget_bytes = 1 << 20});
  const auto refused = [&](uint32_t table, const std::vector<FactorPairs>& factors) {
    return error_of(ErrorCode::kInvalid, [&] { cache.table_clock(table, factors); });
  };
  EXPECT_THAT(refused(0, {{here, here, 2}, {here, here, 2}}),
              HasSubstr("'matrix' with 4 pairs of factors: its samples are 3"));
  EXPECT_THAT(refused(1, {{here, here, 1}}), HasSubstr("'bias' with 1 pairs"));
  EXPECT_THAT(refused(0, {{host.data(), here, 3}}), HasSubstr("210 floats of the left factors"));
  EXPECT_THAT(refused(0, {{here, nullptr, 2}}), HasSubstr("96 floats of the right factors"));
  EXPECT_THAT(refused(2, {}), HasSubstr("local data"));
  EXPECT_THAT(refused(3, {}), HasSubstr("there are 3"));
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { (void)cache.pre_update(0, dense(1)); }),
              HasSubstr("whose factors are sent"));
  EXPECT_EQ(cache.stats().pushes, 0u);
  cache.table_clock(0);
  cache.wait_all();
  EXPECT_EQ(cache.stats().pushes, 1u);
}

TEST(Factors, TablesAndGroupsThatCannotHaveThemAreRefused) {
  const auto problem = [](TableSpec table) {
    table.samples = 2;
    return error_of(ErrorCode::kInvalid, [&] { (void)keys_of({&table, 1}, 3); });
  };
  EXPECT_THAT(problem({"t", 2, dense(2), true}), HasSubstr("'t' is local data"));
  EXPECT_THAT(problem({.name = "t", .row_floats = 2, .keys = dense(2), .read_my_writes = true}),
              HasSubstr("reads its writes"));
  EXPECT_THAT(problem({.name = "t", .row_floats = 2, .keys = dense(2), .max_staleness = 1}),
              HasSubstr("with a staleness"));
  TableSpec many{.name = "t", .row_floats = 2, .keys = dense(2), .samples = kMaxRankLimit / 2};
  EXPECT_THAT(error_of(ErrorCode::kInvalid,
                       [&] {
                         (void)keys_of({&many, 1}, 3);
                       }),
              HasSubstr("of 3 devices"));

  StandaloneExchange exchange(spec_of("groups", 1, 2));
  EXPECT_THAT(
      error_of(ErrorCode::kInvalid, [&] { DeviceGroup(exchange, {.members = 2, .mean = true}); }),
      HasSubstr("divide the errors"));
  DeviceGroup group(exchange, {.members = 3});  // of 6 samples, where each device has 3
  const auto device = make_host_device({.budget_bytes = 4 << 20});
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { Cache(*device, group.member(0), tables()); }),
              HasSubstr("has 3 samples, and its key takes 2 of this device"));
  JobSpec excludes = spec_of("excludes", 1, 1);
  excludes.on_nonfinite = "exclude";
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { StandaloneExchange{excludes}; }),
              HasSubstr("need a server"));
  JobSpec weighs = spec_of("weighs", 1, 1);
  weighs.weights = Weights::kYes;
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { StandaloneExchange{weighs}; }),
              HasSubstr("weights of gradients"));
}

}  // namespace factors_test
}  // namespace phub::geeps
