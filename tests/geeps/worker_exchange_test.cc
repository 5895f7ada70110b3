// Over a whole box.
#include "worker/geeps/worker_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <limits>
#include <ostream>
#include <random>
#include <thread>

#include "kernels/kernels.h"
#include "tests/geeps/exchange_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/completions.h"
#include "worker/device/host_device.h"

namespace phub::geeps {
namespace worker_exchange_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::options_of;
using testing::spec_of;
using testing::tables;

TEST(WorkerExchange, SlackIsTheJobs) {
  Box box;
  const auto slack = [&](const char* consistency, uint32_t rounds) {
    JobSpec spec = spec_of("none", "sum", 1);
    spec.name = consistency;
    spec.consistency = consistency;
    spec.slack = rounds;
    Worker worker(box.options(spec));
    return WorkerExchange(worker, tables()).slack();
  };
  EXPECT_EQ(slack("bsp", 0), 0u);
  EXPECT_EQ(slack("ssp", 4), 4u);
  EXPECT_EQ(slack("async", 0), std::nullopt);
}

// The same name and number of elements, and rows in another order or of another size.
TEST(WorkerExchange, WorkersWithOtherRowsCannotJoin) {
  Box box;
  const auto job = [](const TableSpec& table) {
    JobSpec spec;
    spec.name = "rows";
    spec.keys = keys_of(std::span(&table, 1));
    spec.world_size = 2;
    spec.lease_ms = 60'000;  // nobody is to be lost for being slow
    return spec;
  };
  WorkerOptions first = options_of(box, job({"table", 4, {5, 6, 7}}), 0);
  first.await_ranks = false;
  Worker worker(first);
  for (const TableSpec& other :
       {TableSpec{"table", 4, {5, 7, 6}}, TableSpec{"table", 2, {5, 6, 7, 8, 9, 10}}}) {
    EXPECT_THAT(
        error_of(ErrorCode::kMismatch, [&] { Worker second(options_of(box, job(other), 1)); }),
        HasSubstr("key 0 is 'table #"));
  }
  Worker second(options_of(box, job({"table", 4, {5, 6, 7}}), 1));
}

TEST(WorkerExchange, WhatDoesNotFitTheJobIsRefused) {
  Box box;
  int jobs = 0;
  const auto refusal = [&](JobSpec spec, const std::vector<TableSpec>& tables) {
    spec.name = "job" + std::to_string(++jobs);  // the one before may be there for a moment yet
    return error_of(ErrorCode::kInvalid, [&] {
      Worker worker(box.options(spec));
      WorkerExchange exchange(worker, tables);
    });
  };
  JobSpec spec = spec_of("none", "sum", 1);
  std::vector<TableSpec> other = tables();
  std::swap(other[1].keys[0], other[1].keys[1]);
  EXPECT_THAT(refusal(spec, other), AllOf(HasSubstr("table 'rows'"), HasSubstr("key 1")));
  other = tables();
  other.pop_back();
  EXPECT_THAT(refusal(spec, other), AllOf(HasSubstr("'large #"), HasSubstr("no table")));
  other = tables();
  other.push_back({"more", 1, dense(1)});
  EXPECT_THAT(refusal(spec, other), AllOf(HasSubstr("table 'more'"), HasSubstr("4 keys")));
  spec.keys[2].name = "layer";
  EXPECT_THAT(refusal(spec, tables()), AllOf(HasSubstr("table 'layer'"), HasSubstr("keys_of()")));
  spec = spec_of("none", "sum", 1);
  spec.keys[3].elements += 1;
  spec.keys[3].shape.clear();
  EXPECT_THAT(refusal(spec, tables()), AllOf(HasSubstr("table 'large'"), HasSubstr("82501")));
  spec = spec_of("none", "sum", 1);
  spec.keys[2].format = "rows";
  spec.keys[2].rows_limit = 5;
  EXPECT_THAT(refusal(spec, tables()), AllOf(HasSubstr("rows of table 'layer"), HasSubstr("sent")));
  // Rank 0 must have sent the initial parameters.
  EXPECT_THAT(refusal(spec_of("sgd", "sum", 1), tables()), HasSubstr("broadcast()"));
}

// What it registered is not used any more when it could not be made.
TEST(WorkerExchange, AWorkerIsAsBeforeARefusal) {
  Box box;
  JobSpec spec = spec_of("sgd", "sum", 1);
  spec.parameter_dtype = "bf16";
  Worker worker(box.options(spec));
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { WorkerExchange refused(worker, tables()); }),
              HasSubstr("broadcast()"));
  worker.broadcast(testing::initial_of(spec));
  for (size_t key = 0; key < worker.keys(); ++key) worker.push_pull(key);
  WorkerExchange exchange(worker, tables());
  EXPECT_NE(exchange.parameters(0)[0], 0);
}

struct Formats {
  const char* gradients;
  const char* parameters;
  const char* of_large;  // the key's own; empty: gradients
};

void PrintTo(const Formats& formats, std::ostream* out) {
  *out << formats.gradients << " " << formats.parameters << " " << formats.of_large;
}

class WorkerExchangeFormats : public ::testing::TestWithParam<Formats> {};

// A cache gives and takes f32, whatever the job's formats: it sees what a worker has that converts
// by itself, to the bit.
TEST_P(WorkerExchangeFormats, AreConvertedAsAWorkerDoes) {
  constexpr uint64_t kRounds = 6;
  JobSpec spec = spec_of("momentum", "mean", 2);  // its name: the rounding depends on it
  spec.gradient_dtype = GetParam().gradients;
  spec.parameter_dtype = GetParam().parameters;
  spec.keys[3].format = GetParam().of_large;
  const uint64_t seed = testing::random_seed();
  SCOPED_TRACE(seed);
  const auto initial_from = [&](uint32_t rank) {
    return rank == 0 ? testing::initial_of(spec) : std::vector<float>();
  };
  testing::Parameters expected;
  {
    Box box;
    each_rank(2, [&](uint32_t rank) {
      Worker worker(options_of(box, spec, rank));
      worker.broadcast(initial_from(rank));
      for (uint64_t round = 1; round <= kRounds; ++round) {
        for (size_t key = 0; key < worker.keys(); ++key) {
          if (testing::is_null(rank, round, key)) {
            worker.push(key, {.null = true});
          } else {
            std::vector<float> gradient(spec.keys[key].elements);
            for (size_t i = 0; i < gradient.size(); ++i) {
              gradient[i] = testing::gradient_of(seed, rank, round, key, i);
            }
            const auto dtype =
                kernels::parse_dtype(gradient_memory_format(worker.spec(), worker.spec().keys[key]))
                    .value();
            kernels::convert(gradient.data(), kernels::DType::kF32,
                             worker.gradient_bytes(key).data(), dtype, gradient.size());
            worker.push(key);
          }
          worker.wait(key);
        }
      }
      if (rank == 1) return worker.barrier();
      for (size_t key = 0; key < worker.keys(); ++key) {
        const auto dtype = kernels::parse_dtype(parameter_memory_format(worker.spec())).value();
        kernels::convert(worker.parameter_bytes(key).data(), dtype,
                         expected.emplace_back(spec.keys[key].elements).data(),
                         kernels::DType::kF32, spec.keys[key].elements);
      }
      worker.barrier();
    });
  }
  Box box;
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(box, spec, rank));
    worker.broadcast(initial_from(rank));
    {
      WorkerExchange exchange(worker, tables());
      testing::run(exchange, seed, rank, kRounds, std::mt19937_64(seed + rank));
      EXPECT_TRUE(testing::same_bits(testing::parameters_of(exchange), expected));
    }
    worker.push_pull(0);  // of memory that is the library's again
    worker.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(All, WorkerExchangeFormats,
                         ::testing::Values(Formats{"bf16", "f32", ""}, Formats{"f16", "f16", "f32"},
                                           Formats{"f32", "bf16", "int8"},
                                           Formats{"int8", "f32", "bf16"},
                                           Formats{"fp8-e4m3", "int8", "topk"}));

// next() waits for a key that another worker holds up, and is woken for one that is pushed later.
TEST(WorkerExchange, NextLearnsOfLaterPushes) {
  constexpr int kRounds = 40;
  Box box;
  const JobSpec spec = spec_of("none", "sum", 2);
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(box, spec, rank));
    WorkerExchange exchange(worker, tables());
    if (rank == 0) {
      exchange.push(3, 0);  // the other pushes it after all rounds of key 0
      const uint64_t sleeps = worker.stats().sleeps;
      auto next = std::async(std::launch::async, [&] {
        std::vector<int> rounds(exchange.keys());
        for (int n = 0; n < kRounds + 1; ++n) {
          const size_t key = exchange.next().value();
          if (++rounds[key] < kRounds && key == 0) exchange.push(0, 0);
        }
        return rounds;
      });
      while (worker.stats().sleeps == sleeps) std::this_thread::yield();
      exchange.push(0, 0);
      EXPECT_THAT(next.get(), ElementsAre(kRounds, 0, 0, 1));
    } else {
      for (int round = 0; round < kRounds; ++round) {
        exchange.push(0, 0);
        EXPECT_EQ(exchange.next(), 0u);
      }
      exchange.push(3, 0);
      EXPECT_EQ(exchange.next(), 3u);
    }
    worker.barrier();
  });
}

TEST(WorkerExchange, StopEndsNext) {
  Box box;
  const JobSpec spec = spec_of("none", "sum", 2);
  WorkerOptions first = options_of(box, spec, 0);
  first.await_ranks = false;
  Worker worker(first);
  Worker other(options_of(box, spec, 1));
  for (const bool pushed : {false, true}) {  // asleep here, or in the worker
    WorkerExchange exchange(worker, tables());
    if (pushed) exchange.push(0, 0);
    const uint64_t sleeps = worker.stats().sleeps;
    auto next = std::async(std::launch::async, [&] { return exchange.next(); });
    while (pushed && worker.stats().sleeps == sleeps) std::this_thread::yield();
    exchange.stop();
    EXPECT_EQ(next.get(), std::nullopt);
    EXPECT_EQ(exchange.next(), std::nullopt);
  }
}

// A cache ends before its last result is here: neither the worker's next one nor its completions
// hear of it.
TEST(WorkerExchange, ResultsThatAreDueWhenItEndsAreNobodys) {
  Box box;
  const JobSpec spec = spec_of("none", "sum", 2);
  std::promise<void> first_ended, second_ended;
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(box, spec, rank));
    worker.wait_all();
    if (rank == 1) {
      first_ended.get_future().wait_for(std::chrono::seconds(20));
      for (int round = 0; round < 2; ++round) worker.push_pull(0);
      second_ended.get_future().wait_for(std::chrono::seconds(20));
      for (const size_t key : {0, 1}) worker.push(key);
      worker.wait_all();
      return worker.barrier();
    }
    const auto device = make_host_device({.budget_bytes = 1 << 20});
    const auto iteration = [](Cache& cache) {
      UpdateBuffer update(cache, 0, dense(1));
      if (update.data() != nullptr) update.data()[0] = 1;
      update.update();
      cache.table_clock(0);
    };
    const auto with_cache = [&](auto use) {
      WorkerExchange exchange(worker, tables());
      Cache cache(*device, exchange, tables(), {.timeout = std::chrono::seconds(30)});
      use(cache);
    };
    with_cache(iteration);
    first_ended.set_value();
    with_cache([&](Cache& cache) {
      cache.begin_virtual();
      iteration(cache);
      cache.finish_sequence();
      iteration(cache);
      EXPECT_EQ(ReadBuffer(cache, 0, dense(1)).data()[0], 1);
      iteration(cache);
    });
    Completions completions(worker);
    std::promise<size_t> told;
    completions.push(1, 0, [&](const Pushed& pushed, const Error* error) {
      EXPECT_EQ(error, nullptr);
      told.set_value(pushed.key);
    });
    second_ended.set_value();
    EXPECT_EQ(told.get_future().get(), 1u);
    worker.barrier();
  });
}

// A NaN ends the job: whoever waits is told, and whoever calls from then on.
TEST(WorkerExchange, ErrorsOfTheWorkerStay) {
  Box box;
  const JobSpec spec = spec_of("none", "sum", 2);
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(box, spec, rank));
    WorkerExchange exchange(worker, tables());
    if (rank == 1) exchange.gradient(2)[100] = std::numeric_limits<float>::quiet_NaN();
    exchange.push(2, 0);
    const std::string what = error_of(ErrorCode::kNonFinite, [&] { exchange.next(); });
    EXPECT_THAT(what, AllOf(HasSubstr("rank 1 sent a NaN"), HasSubstr("key 'layer #")));
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.push(0, 0); }), what);
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.push_null(1); }), what);
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.next(); }), what);
  });
}

TEST(WorkerExchange, AFailedPushEndsNext) {
  Box box;
  Worker worker(box.options(spec_of("none", "sum", 1)));
  WorkerExchange exchange(worker, tables());
  auto next = std::async(std::launch::async, [&] { exchange.next(); });
  worker.leave();
  EXPECT_THAT(error_of(ErrorCode::kFenced, [&] { exchange.push(0, 0); }), HasSubstr("has left"));
  EXPECT_THAT(error_of(ErrorCode::kFenced, [&] { next.get(); }), HasSubstr("has left"));
}

TEST(WorkerExchange, AKeyIsPushedOnceUntilItIsBack) {
  Box box;
  Worker worker(box.options(spec_of("none", "sum", 1)));
  WorkerExchange exchange(worker, tables());
  exchange.push(1, 0);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { exchange.push_null(1); }), HasSubstr("'rows'"));
  EXPECT_EQ(exchange.next(), 1u);
  exchange.push_null(1);
  EXPECT_EQ(exchange.next(), 1u);
}

}  // namespace worker_exchange_test
}  // namespace phub::geeps
