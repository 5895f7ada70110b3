#include "worker/geeps/standalone_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <limits>

#include "kernels/kernels.h"
#include "tests/geeps/exchange_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::geeps {
namespace standalone_exchange_test {

using phub::testing::error_of;
using testing::expected;
using ::testing::HasSubstr;
using testing::initial_of;
using testing::Parameters;
using testing::parameters_of;
using testing::random_seed;
using testing::same_bits;
using testing::spec_of;
using testing::tables;

constexpr uint64_t kRounds = 8;

std::span<const float> initial_if_any(const JobSpec& spec, const std::vector<float>& initial) {
  return spec.initial == "broadcast" ? std::span(initial) : std::span<const float>();
}

Parameters alone(const JobSpec& spec, uint64_t seed) {
  const std::vector<float> initial = initial_of(spec);
  StandaloneExchange exchange(spec, initial_if_any(spec, initial));
  testing::run(exchange, seed, 0, kRounds, std::mt19937_64(seed));
  return parameters_of(exchange);
}

Parameters on_the_box(phub::testing::Box& box, const JobSpec& spec, uint64_t seed) {
  const std::vector<float> initial = initial_of(spec);
  Worker worker(box.options(spec));
  worker.broadcast(initial_if_any(spec, initial));
  WorkerExchange exchange(worker, tables());
  testing::run(exchange, seed, 0, kRounds, std::mt19937_64(seed + 1));
  return parameters_of(exchange);
}

// Without a server.
std::vector<std::string> optimizers() {
  std::vector<std::string> names;
  for (const std::string_view name : kernels::optimizer_names()) {
    JobSpec spec;
    spec.optimizer = name;
    if (!adapts_by_key(spec) && !steps_whole_keys(spec)) names.emplace_back(name);
  }
  return names;
}

TEST(StandaloneExchange, EveryOptimizerGivesTheBitsOfTheOracle) {
  const uint64_t seed = random_seed();
  for (const std::string& optimizer : optimizers()) {
    for (const char* reduction : {"sum", "mean"}) {
      const JobSpec spec = spec_of(optimizer, reduction, 1);
      EXPECT_TRUE(same_bits(alone(spec, seed), expected(spec, seed, 1, kRounds)))
          << spec.name << ", seed " << seed;
    }
  }
}

TEST(StandaloneExchange, EveryOptimizerGivesTheBitsOfABoxWithOneWorker) {
  const uint64_t seed = random_seed();
  phub::testing::Box box;
  for (const char* consistency : {"bsp", "ssp", "async"}) {
    for (const std::string& optimizer : optimizers()) {
      JobSpec spec = spec_of(optimizer, "mean", 1);
      spec.consistency = consistency;
      spec.chunk_elements = 1024;
      spec.schedule = {{.round = 3, .values = {{"lr", 0.2}}},
                       {.round = 5, .values = {{"grad_scale", 4.0}, {"weight_decay", 0.5}}}};
      if (spec.optimizer == "none") spec.schedule = {{.round = 5, .values = {{"grad_scale", 4.0}}}};
      EXPECT_TRUE(same_bits(alone(spec, seed), on_the_box(box, spec, seed)))
          << consistency << " " << spec.name << ", seed " << seed;
    }
  }
}

TEST(StandaloneExchange, SchedulesOfTheRateGiveTheBitsOfTheOracleAndOfABox) {
  const uint64_t seed = random_seed();
  phub::testing::Box box;
  const std::map<std::string, double> schedules[] = {
      {{"lr_exponential", 0.75}},
      {{"lr_inverse", 0.25}, {"lr_inverse_power", 0.75}},
      {{"lr_polynomial", 5}, {"lr_polynomial_power", 2}},
      {{"lr_cosine", 6}, {"lr_end", 0.25}},
      {{"lr_warmup", 3}, {"lr_warmup_from", 0.5}, {"lr_cosine", 4}},
  };
  for (size_t i = 0; i < std::size(schedules); ++i) {
    JobSpec spec = spec_of(i % 2 ? "adamw" : "nesterov", "mean", 1);
    spec.name += "-" + std::to_string(i);
    spec.hyper.insert(schedules[i].begin(), schedules[i].end());
    const Parameters here = alone(spec, seed);
    EXPECT_TRUE(same_bits(here, expected(spec, seed, 1, kRounds))) << i << ", seed " << seed;
    EXPECT_TRUE(same_bits(here, on_the_box(box, spec, seed))) << i << ", seed " << seed;
    spec.consistency = "async";
    spec.name += "-async";
    EXPECT_TRUE(same_bits(alone(spec, seed), on_the_box(box, spec, seed)))
        << i << ", seed " << seed;
  }
}

TEST(StandaloneExchange, ChangesOfHyperparametersBeginWithARoundThatNobodyHasBegun) {
  const uint64_t seed = random_seed();
  JobSpec spec = spec_of("adam", "sum", 1);
  spec.schedule = {{.round = 5, .values = {{"lr", 0.01}}}};
  StandaloneExchange exchange(spec, initial_of(spec));
  const auto push_and_wait = [&](size_t key, uint64_t round) {
    testing::push(exchange, seed, 0, round, key, 0);
    ASSERT_EQ(exchange.next(), key);
  };
  // Key 0 is a round ahead when lr changes: that is for round 3 on, for everyone.
  push_and_wait(0, 1);
  push_and_wait(0, 2);
  for (size_t key = 1; key < exchange.keys(); ++key) push_and_wait(key, 1);
  exchange.set_hyper({{"lr", 0.5}});
  for (size_t key = 1; key < exchange.keys(); ++key) push_and_wait(key, 2);
  for (uint64_t round = 3; round <= kRounds; ++round) {
    if (round == 7) exchange.set_hyper({{"beta1", 0.5}, {"lr", 0.125}});
    for (size_t key = 0; key < exchange.keys(); ++key) push_and_wait(key, round);
  }
  const Parameters want =
      expected(spec, seed, 1, kRounds, [](uint64_t round, kernels::Hyper& hyper) {
        if (round == 3) hyper.lr = 0.5;
        if (round == 5) hyper.lr = 0.01;  // the schedule
        if (round == 7) hyper.beta1 = 0.5, hyper.lr = 0.125;
      });
  EXPECT_TRUE(same_bits(parameters_of(exchange), want)) << "seed " << seed;
}

// The state of one goes on in another, or on a box, to the bits of one that went through.
TEST(StandaloneExchange, StateGoesOnElsewhere) {
  const uint64_t seed = random_seed();
  phub::testing::Box box;
  for (const char* optimizer : {"momentum", "adam", "adadelta", "sgd"}) {
    JobSpec spec = spec_of(optimizer, "sum", 1);
    const std::vector<float> initial = initial_of(spec);
    const size_t arrays = 1 + optimizer_states(spec).size();
    const auto rounds = [&](Exchange& exchange, uint64_t first, uint64_t last) {
      for (uint64_t round = first; round <= last; ++round) {
        for (size_t key = 0; key < exchange.keys(); ++key) {
          testing::push(exchange, seed, 0, round, key, 0);
          ASSERT_EQ(exchange.next(), key);
        }
      }
    };
    StandaloneExchange first(spec, initial);
    rounds(first, 1, 4);
    std::vector<std::vector<float>> memory;
    std::vector<KeyState> states;
    for (size_t key = 0; key < first.keys(); ++key) {
      KeyState& state = states.emplace_back(KeyState{.key = key, .arrays = {}});
      for (size_t i = 0; i < arrays; ++i) memory.emplace_back(first.elements(key));
      for (size_t i = 0; i < arrays; ++i)
        state.arrays.push_back(memory[memory.size() - arrays + i]);
    }
    first.get_state(states);
    for (const KeyState& state : states) EXPECT_EQ(state.step, 4u);
    rounds(first, 5, kRounds);
    EXPECT_TRUE(same_bits(parameters_of(first), expected(spec, seed, 1, kRounds)));

    const std::vector<float> others(initial.size(), 3);
    StandaloneExchange second(spec, others);
    rounds(second, 1, 1);  // what it had does not matter
    second.set_state(states);
    EXPECT_EQ(second.parameters(2)[5], states[2].arrays[0][5]);
    rounds(second, 5, kRounds);
    EXPECT_TRUE(same_bits(parameters_of(second), parameters_of(first))) << optimizer;

    Worker worker(box.options(spec));
    worker.broadcast(others);
    WorkerExchange third(worker, tables());
    worker.set_hyper(spec.hyper);  // returns when the job has begun
    third.set_state(states);
    rounds(third, 5, kRounds);
    EXPECT_TRUE(same_bits(parameters_of(third), parameters_of(first))) << optimizer;
  }
}

TEST(StandaloneExchange, StateThatIsNotThereIsRefused) {
  const auto refusal = [](const char* optimizer, const char* consistency, const KeyState& state) {
    JobSpec spec = spec_of(optimizer, "sum", 1);
    spec.consistency = consistency;
    spec.initial = "zeros";
    StandaloneExchange exchange(spec);
    std::vector<KeyState> states = {state};
    const std::string set = error_of(ErrorCode::kInvalid, [&] { exchange.set_state(states); });
    EXPECT_EQ(error_of(ErrorCode::kInvalid, [&] { exchange.get_state(states); }), set);
    return set;
  };
  std::vector<float> one(1), two(2);
  EXPECT_THAT(refusal("adam", "async", {.key = 0, .arrays = {one, one, one}}),
              HasSubstr("'async'"));
  EXPECT_THAT(refusal("none", "bsp", {.key = 0, .arrays = {one}}), HasSubstr("'none'"));
  EXPECT_THAT(refusal("adam", "bsp", {.key = 4, .arrays = {one, one, one}}), HasSubstr("key 4"));
  EXPECT_THAT(refusal("adam", "bsp", {.key = 0, .arrays = {one, one}}),
              HasSubstr("'one' is 3 arrays of 1 elements"));
  EXPECT_THAT(refusal("adam", "bsp", {.key = 0, .arrays = {one, two, one}}), HasSubstr("3 arrays"));
  JobSpec spec = spec_of("sgd", "sum", 1);
  spec.initial = "zeros";
  StandaloneExchange exchange(spec);
  std::vector<KeyState> states = {{.key = 0, .arrays = {one}}};
  exchange.push(0, 0);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { exchange.get_state(states); }),
              HasSubstr("has not come back"));
}

TEST(StandaloneExchange, WithoutInitialParametersTheyAreZero) {
  JobSpec spec = spec_of("sgd", "sum", 1);
  spec.initial = "zeros";
  StandaloneExchange exchange(spec);
  for (const auto& parameters : parameters_of(exchange)) {
    EXPECT_THAT(parameters, ::testing::Each(0.0f));
  }
  EXPECT_EQ(exchange.keys(), 4u);
  EXPECT_EQ(exchange.name(1), "rows");
  EXPECT_EQ(exchange.elements(1), 9u);
  EXPECT_EQ(exchange.rank(), 0u);
  EXPECT_EQ(exchange.world_size(), 1u);
}

TEST(StandaloneExchange, SlackIsTheJobs) {
  JobSpec spec = spec_of("none", "sum", 1);
  EXPECT_EQ(StandaloneExchange(spec).slack(), 0u);
  spec.consistency = "ssp", spec.slack = 3;
  EXPECT_EQ(StandaloneExchange(spec).slack(), 3u);
  spec.consistency = "async", spec.slack = 0;
  EXPECT_EQ(StandaloneExchange(spec).slack(), std::nullopt);
}

// A NaN: the key is pushed with it, and the error of whoever calls next.
TEST(StandaloneExchange, NonFiniteGradientsStopOrPass) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const char* policy : {"stop", "exclude", "pass"}) {
    SCOPED_TRACE(policy);
    JobSpec spec = spec_of("none", "sum", 1);
    spec.on_nonfinite = policy;
    StandaloneExchange exchange(spec);
    exchange.gradient(3)[40'000] = kNan;
    exchange.push(3, 0);
    if (spec.on_nonfinite == "pass") {
      EXPECT_EQ(exchange.next(), 3u);
      EXPECT_TRUE(std::isnan(exchange.parameters(3)[40'000]));
      continue;
    }
    // With one worker nobody is left: to exclude it is to stop.
    const auto what = error_of(ErrorCode::kNonFinite, [&] { exchange.next(); });
    EXPECT_THAT(what, HasSubstr("key 'large', elements 32768 to 40959"));
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.next(); }), what);
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.push(0, 0); }), what);
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.push_null(1); }), what);
    EXPECT_EQ(error_of(ErrorCode::kNonFinite, [&] { exchange.set_hyper({}); }), what);
  }
}

// Out of lock-step only the chunk with the NaN is left out, and it is behind by a step of the
// optimizer: as on a box.
TEST(StandaloneExchange, OutOfLockStepAChunkIsLeftOut) {
  JobSpec spec = spec_of("adam", "sum", 1);
  spec.consistency = "async";
  spec.on_nonfinite = "exclude";
  const std::vector<float> initial = initial_of(spec);
  const auto go = [](Exchange& exchange) {
    for (int round = 0; round < 4; ++round) {
      std::ranges::fill(exchange.gradient(3), 0.5f + static_cast<float>(round));
      if (round == 1) exchange.gradient(3)[9000] = std::numeric_limits<float>::infinity();
      exchange.push(3, 0);
      EXPECT_EQ(exchange.next(), 3u);
    }
    return parameters_of(exchange);
  };
  phub::testing::Box box;
  Worker worker(box.options(spec));
  worker.broadcast(initial);
  WorkerExchange there(worker, tables());
  StandaloneExchange here(spec, initial);
  EXPECT_TRUE(same_bits(go(here), go(there)));
}

TEST(StandaloneExchange, StopEndsNext) {
  StandaloneExchange exchange(spec_of("none", "sum", 1));
  auto next = std::async(std::launch::async, [&] { return exchange.next(); });
  exchange.stop();
  EXPECT_EQ(next.get(), std::nullopt);
  exchange.push(0, 0);
  EXPECT_EQ(exchange.next(), std::nullopt);
}

TEST(StandaloneExchange, WhatItCannotDoIsRefused) {
  const auto refusal = [](auto change) {
    JobSpec spec = spec_of("rmsprop", "sum", 1);
    change(spec);
    const std::vector<float> initial = initial_of(spec);
    return error_of(ErrorCode::kInvalid, [&] { StandaloneExchange(spec, initial); });
  };
  EXPECT_THAT(refusal([](JobSpec& s) { s.world_size = 2; }), HasSubstr("2 workers"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.optimizer = "adamax"; }), HasSubstr("'adamax'"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.gradient_dtype = "bf16"; }), HasSubstr("bf16"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.parameter_dtype = "f16"; }), HasSubstr("f16"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.work = "sum"; }), HasSubstr("work"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.state_dtype = "8bit"; }), HasSubstr("states of 8 bits"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.hyper = {{"rate", 1}}; }), HasSubstr("'rate'"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.schedule = {{3, {{"lr", -1}}}}; }), HasSubstr("'lr'"));
  EXPECT_THAT(refusal([](JobSpec& s) {
                s.schedule = {{3, {{"rmsprop_momentum", 1}}}};
              }),
              HasSubstr("rmsprop_momentum"));
  EXPECT_THAT(refusal([](JobSpec& s) { s.keys.clear(); }), HasSubstr("keys"));

  const JobSpec spec = spec_of("sgd", "sum", 1);
  std::vector<float> initial = initial_of(spec);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { StandaloneExchange{spec}; }),
              HasSubstr("0 initial parameters"));
  initial.pop_back();
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { StandaloneExchange(spec, initial); }),
              HasSubstr("initial parameters"));
}

// A wrong call changes nothing.
TEST(StandaloneExchange, WrongCallsAreRefused) {
  JobSpec spec = spec_of("sgd", "sum", 1);
  spec.initial = "zeros";
  StandaloneExchange exchange(spec);
  EXPECT_THAT(error_of(ErrorCode::kInvalid,
                       [&] {
                         exchange.set_hyper({{"lr", -1.0}});
                       }),
              HasSubstr("'lr'"));
  std::ranges::fill(exchange.gradient(0), 1.0f);
  exchange.push(0, 0);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { exchange.push_null(0); }), HasSubstr("'one'"));
  EXPECT_EQ(exchange.next(), 0u);
  EXPECT_EQ(exchange.parameters(0)[0], -0.05f);
}

}  // namespace standalone_exchange_test
}  // namespace phub::geeps
