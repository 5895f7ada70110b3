// optimize against the reference, bit for bit: every optimizer, write-back format, kind of store,
// instruction set, length and alignment.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/trust.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace optimize_test {

using test::Array;
using test::Values;

std::vector<Optimizer> all_optimizers() {
  std::vector<Optimizer> all;
  for (const std::string_view name : optimizer_names()) all.push_back(*parse_optimizer(name));
  return all;
}

struct Variant {
  Optimizer optimizer;
  Hyper hyper;
  uint64_t t;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const Optimizer o : all_optimizers()) {
    if (o == Optimizer::kAdafactor) continue;  // whole_key_test.cc
    for (const uint64_t t : {1, 7}) {
      for (const double decay : {0.0, 0.01}) {
        Hyper h = default_hyper(o);
        h.weight_decay = decay;
        h.lr_decay = decay;
        h.dampening = decay * 10;
        all.push_back({o, h, t});
        if (o == Optimizer::kRmsprop) {
          h.rmsprop_momentum = 0.9;
          all.push_back({o, h, t});
        }
        if (adapts(o) && decay == 0) {
          h.always_adapt = 1;
          all.push_back({o, h, t});
        }
      }
    }
  }
  return all;
}

struct Target {
  bool writes;
  DType type;
  Store store;
};
constexpr Target kWriteBacks[] = {
    {false, DType::kF32, Store::kCached},   {true, DType::kF32, Store::kCached},
    {true, DType::kBF16, Store::kCached},   {true, DType::kF16, Store::kCached},
    {true, DType::kF32, Store::kStreaming}, {true, DType::kBF16, Store::kStreaming},
    {true, DType::kF16, Store::kStreaming},
};

struct Model {
  Model(size_t n, Values values, std::mt19937_64& random) {
    for (auto* array : {&g, &params, &state0, &state1}) {
      array->resize(n);
      for (float& value : *array) value = test::make_value(random, values);
    }
    // Second moments are not negative (in `kAny` they may be: the square root is NaN then).
    if (values != Values::kAny) {
      for (float& value : state1) value = std::abs(value);
      for (float& value : state0) value = std::abs(value);
    }
  }
  std::vector<float> g, params, state0, state1;
};

void check(const Variant& v, size_t n, Values values, std::mt19937_64& random) {
  SCOPED_TRACE(::testing::Message() << name_of(v.optimizer) << ", step " << v.t << ", decay "
                                    << v.hyper.weight_decay << ", " << n << " elements, values "
                                    << static_cast<int>(values) << ", PHUB_SEED " << test::seed());
  const Model before(n, values, random);
  Model after = before;
  const float trust = adapts(v.optimizer) ? test::make_value(random, Values::kOrdinary) : 1;
  reference::step(v.optimizer, v.hyper, v.t, after.g.data(), after.params.data(),
                  after.state0.data(), after.state1.data(), n, trust);
  const bool has_params = v.optimizer != Optimizer::kNone;
  const size_t states = state_arrays(v.optimizer, v.hyper);
  Step step = make_step(v.optimizer, v.hyper, v.t);
  step.trust = trust;
  std::array<size_t, 5> offsets;
  for (size_t& offset : offsets) offset = random() % 32;

  test::for_each_target([&] {
    for (const Target& target : kWriteBacks) {
      Array g(before.g.data(), n * 4, offsets[0] * 4);
      Array params(before.params.data(), n * 4, offsets[1] * 4);
      Array state0(before.state0.data(), n * 4, offsets[2] * 4);
      Array state1(before.state1.data(), n * 4, offsets[3] * 4);
      const size_t out_bytes = n * bytes_of(target.type);
      Array out(out_bytes, offsets[4] * bytes_of(target.type));
      std::vector<uint32_t> expected_out(n);
      reference::convert(after.params.data(), DType::kF32, expected_out.data(), target.type, n);

      optimize(step, g.as<float>(), has_params ? params.as<float>() : nullptr,
               states > 0 ? state0.as<float>() : nullptr, states > 1 ? state1.as<float>() : nullptr,
               n, target.writes ? out.data() : nullptr, target.type, target.store);

      SCOPED_TRACE(::testing::Message()
                   << "write-back " << target.writes << " " << name_of(target.type) << ", store "
                   << static_cast<int>(target.store));
      if (has_params) {
        ASSERT_TRUE(params.holds(after.params.data()));
      }
      if (states > 0) {
        ASSERT_TRUE(state0.holds(after.state0.data()));
      }
      if (states > 1) {
        ASSERT_TRUE(state1.holds(after.state1.data()));
      }
      if (target.writes) {
        ASSERT_TRUE(out.holds(expected_out.data()));
      }
      ASSERT_TRUE(g.holds(before.g.data()));
      for (const Array* array : {&g, &params, &state0, &state1, &out}) {
        ASSERT_TRUE(array->intact());
      }
    }
  });
}

// The arrays before the step are measured, and stay as they are.
void check_measure(const Variant& v, size_t n, Values values, std::mt19937_64& random) {
  SCOPED_TRACE(::testing::Message()
               << name_of(v.optimizer) << ", step " << v.t << ", decay " << v.hyper.weight_decay
               << ", " << n << " elements, PHUB_SEED " << test::seed());
  const Model model(n, values, random);
  reference::Norms want = reference::squares(v.optimizer, v.hyper, v.t, model.g, model.params,
                                             model.state0, model.state1);
  const Step step = make_step(v.optimizer, v.hyper, v.t);
  if (v.hyper.weight_decay == 0 && v.hyper.always_adapt == 0) want = {};
  const auto bits = [](double value) {
    return std::isnan(value) ? uint64_t{1} : std::bit_cast<uint64_t>(value);
  };
  test::for_each_target([&] {
    Array g(model.g.data(), n * 4, random() % 32 * 4);
    Array params(model.params.data(), n * 4, random() % 32 * 4);
    Array state0(model.state0.data(), n * 4, random() % 32 * 4);
    Array state1(model.state1.data(), n * 4, random() % 32 * 4);
    Array scratch(n * 4, random() % 32 * 4);
    const KeyNorms got =
        measure(step, g.as<float>(), params.as<float>(), state0.as<float>(),
                state_arrays(v.optimizer, v.hyper) > 1 ? state1.as<float>() : nullptr, n,
                scratch.as<float>());
    ASSERT_EQ(bits(got.parameters), bits(want.parameters)) << got.parameters;
    ASSERT_EQ(bits(got.update), bits(want.update)) << got.update;
    ASSERT_TRUE(g.holds(model.g.data()) && params.holds(model.params.data()) &&
                state0.holds(model.state0.data()) && state1.holds(model.state1.data()));
    for (const Array* array : {&g, &params, &state0, &state1, &scratch}) {
      ASSERT_TRUE(array->intact());
    }
  });
}

TEST(Trust, MeasuresEveryLength) {
  std::mt19937_64 random(test::seed());
  for (const Variant& variant : variants()) {
    if (!adapts(variant.optimizer)) continue;
    for (size_t n = 0; n <= 300; ++n) {
      check_measure(variant, n, n % 2 ? Values::kFinite : Values::kAny, random);
      if (HasFatalFailure()) return;
    }
    check_measure(variant, 8193, Values::kOrdinary, random);
  }
}

TEST(Trust, RatiosOfAnyNorms) {
  std::mt19937_64 random(test::seed());
  constexpr double kSome[] = {0, 1e-30, 0.5, 3, 1e20, HUGE_VAL, NAN};
  for (const Variant& v : variants()) {
    if (!adapts(v.optimizer)) continue;
    const Step step = make_step(v.optimizer, v.hyper, v.t);
    for (const double p : kSome) {
      for (const double u : kSome) {
        const float want = reference::trust_ratio(v.optimizer, v.hyper, {p, u});
        const float got = trust_ratio(step, {p, u});
        EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
            << name_of(v.optimizer) << ": " << p << " and " << u << " give " << got << ", not "
            << want;
        EXPECT_FALSE(std::isinf(got)) << name_of(v.optimizer) << ": " << p << " and " << u;
      }
    }
  }
}

TEST(Optimize, EveryLength) {
  std::mt19937_64 random(test::seed());
  for (const Variant& variant : variants()) {
    for (size_t n = 0; n <= 300; ++n) {
      check(variant, n, n % 2 ? Values::kFinite : Values::kAny, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Optimize, AroundOneChunk) {
  std::mt19937_64 random(test::seed());
  for (const Variant& variant : variants()) {
    if (variant.t == 1) continue;
    for (const size_t n : {8191, 8192, 8193}) {
      check(variant, n, Values::kOrdinary, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Optimize, NoneWithoutWriteBackDoesNothing) {
  const float g = 1;
  optimize(make_step(Optimizer::kNone, {}, 1), &g, nullptr, nullptr, nullptr, 1, nullptr,
           DType::kF32, Store::kCached);
}

TEST(OptimizerNames, RoundTrip) {
  for (const Optimizer o : all_optimizers()) EXPECT_EQ(parse_optimizer(name_of(o)), o);
  EXPECT_EQ(parse_optimizer("adamax"), std::nullopt);
  EXPECT_EQ(parse_optimizer(""), std::nullopt);
}

TEST(StateArrays, AsPyTorchKeeps) {
  Hyper h;
  EXPECT_EQ(state_arrays(Optimizer::kNone, h), 0u);
  EXPECT_EQ(state_arrays(Optimizer::kSgd, h), 0u);
  EXPECT_EQ(state_arrays(Optimizer::kMomentum, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kNesterov, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kAdam, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kAdamW, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kSparseAdam, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kAdadelta, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kAdagrad, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kLion, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kLars, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kLamb, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kAdafactor, h), 1u);
  EXPECT_EQ(state_arrays(Optimizer::kMuon, h), 2u);
  EXPECT_EQ(state_arrays(Optimizer::kRmsprop, h), 1u);
  h.rmsprop_momentum = 0.5;
  EXPECT_EQ(state_arrays(Optimizer::kRmsprop, h), 2u);
}

TEST(Targets, CanBeForced) {
  ASSERT_FALSE(targets().empty());
  try {
    force_target("MMX");
    FAIL() << "an unknown instruction set was accepted";
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("MMX"), std::string::npos) << message;
    EXPECT_NE(message.find(targets().front()), std::string::npos) << message;
  }
}

}  // namespace optimize_test
}  // namespace phub::kernels
