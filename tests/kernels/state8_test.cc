// State of 8 bits against the reference, bit for bit, on every instruction set; and steps of
// optimizers on it.
#include "kernels/state8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"
#include "tests/oracle/state8.h"

namespace phub::kernels {
namespace state8_test {

using test::Array;
using test::Values;

// A state array of one chunk, and its memory, at odd places.
struct Held {
  Held(size_t n, bool is_signed, std::mt19937_64& random)
      : codes(n, random() % 64),
        scales(n / kStateBlock * sizeof(float), random() % 8 * sizeof(float)),
        last(sizeof(float), 0),
        state{codes.as<uint8_t>(), scales.as<float>(), last.as<float>(), is_signed} {}
  bool intact() const { return codes.intact() && scales.intact() && last.intact(); }
  void expect(const reference::StateCodes& want) {
    const size_t whole = want.codes.size() / kStateBlock;
    EXPECT_TRUE(codes.holds(want.codes.data()));
    EXPECT_TRUE(scales.holds(want.scales.data()));
    if (want.scales.size() > whole) {
      EXPECT_TRUE(last.holds(&want.scales.back()));
    }
    EXPECT_TRUE(intact());
  }
  Array codes, scales, last;
  State8 state;
};

std::vector<float> some(size_t n, Values values, bool is_signed, std::mt19937_64& random) {
  std::vector<float> all(n);
  for (float& x : all) {
    x = test::make_value(random, values);
    if (!is_signed && values == Values::kOrdinary) x = std::fabs(x);
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

void check(const std::vector<float>& x, bool is_signed, std::mt19937_64& random) {
  const reference::StateCodes want = reference::encode_state(x, is_signed);
  const std::vector<float> decoded = reference::decode_state(want, is_signed);
  test::for_each_target([&] {
    Held held(x.size(), is_signed, random);
    Array from(x.data(), x.size() * 4, random() % 16 * 4);
    encode_state(from.as<float>(), x.size(), held.state);
    held.expect(want);
    Array back(x.size() * 4, random() % 16 * 4);
    decode_state(held.state, x.size(), back.as<float>());
    ASSERT_TRUE(back.holds(decoded.data()) && back.intact());
    encode_state(back.as<float>(), x.size(), held.state);
    held.expect(want);
    std::vector<float> rounded = x;
    round_state(rounded.data(), x.size(), is_signed);
    ASSERT_TRUE(same_bits(rounded, decoded));
  });
}

TEST(State8, EveryLengthAsTheReferenceHasIt) {
  std::mt19937_64 random(test::seed());
  for (const bool is_signed : {true, false}) {
    for (size_t n = 0; n <= 600; n += n < 300 ? 1 : 7) {
      SCOPED_TRACE(::testing::Message() << n << " elements, PHUB_SEED " << test::seed());
      const auto values = static_cast<Values>(n % 3);
      check(some(n, values, is_signed, random), is_signed, random);
      if (HasFailure()) return;
    }
  }
}

// REQUIRES: x[0] is the largest magnitude.
void expect_neighbours(const std::vector<float>& x, bool is_signed) {
  const auto& values = reference::state_values(is_signed);
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  const std::vector<uint8_t> codes = reference::encode_state(x, is_signed).codes;
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = double{x[i]} / x[0], got = values[codes[i]];
    const double inside = std::clamp(wanted, sorted.front(), sorted.back());
    EXPECT_LE(got, *std::ranges::lower_bound(sorted, inside)) << wanted;
    EXPECT_GE(got, *(std::ranges::upper_bound(sorted, inside) - 1)) << wanted;
  }
}

// Around every value, and the middles of two, with a scale of 1 and with others.
TEST(State8, OneOfTheTwoValuesThatItLiesBetween) {
  std::mt19937_64 random(test::seed());
  for (const bool is_signed : {true, false}) {
    const auto& values = reference::state_values(is_signed);
    for (const float scale : {1.0f, 3.0f, 0x1p-100f, 1.7e38f}) {
      for (size_t code = 0; code + 1 < (is_signed ? 128u : 255u); ++code) {
        std::vector<float> x = {scale};
        for (const float at : {(values[code] + values[code + 1]) / 2, values[code]}) {
          const float near = at * scale;
          for (const float toward : {0.0f, near, 2 * scale}) {
            x.push_back(std::min(std::nextafter(near, toward), scale));
            x.push_back(-x.back());
          }
        }
        check(x, is_signed, random);
        expect_neighbours(x, is_signed);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(State8, ValuesAscendToOne) {
  for (const bool is_signed : {true, false}) {
    const auto& values = reference::state_values(is_signed);
    for (size_t code = 1; code < (is_signed ? 128u : 255u); ++code) {
      EXPECT_LT(values[code - 1], values[code]);
    }
    EXPECT_EQ(values[0], 0.0f);
    EXPECT_NEAR(values[1], is_signed ? 1e-6 : 0.5e-6, 1e-12);
    EXPECT_EQ(values[is_signed ? 127 : 254], 1.0f);
  }
}

TEST(State8, InTheMeanAnElementStaysWhatItWas) {
  std::mt19937_64 random(test::seed());
  for (const bool is_signed : {true, false}) {
    for (const float about : {0.93f, 0.31f, 0.1002f, 0.04f, 0.0013f}) {
      std::vector<float> x(kStateBlock * 400);
      double sum = 0, after = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const auto more = static_cast<float>(random() % 1'000'000) * 1e-7f;
        x[i] = i % kStateBlock == 0 ? 1.0f : about - about * more;
        if (i % kStateBlock != 0) sum += x[i];
      }
      round_state(x.data(), x.size(), is_signed);
      for (size_t i = 0; i < x.size(); ++i) after += i % kStateBlock != 0 ? x[i] : 0;
      EXPECT_NEAR(after / sum, 1, 0.002) << about;
    }
  }
}

TEST(State8, ASecondMomentThatIsNotZeroStaysSo) {
  std::vector<float> v = {1.0f, 1e-30f, 0.0f}, m = v;
  round_state(v.data(), v.size(), false);
  EXPECT_GT(v[1], 1e-7f);
  EXPECT_EQ(v[2], 0.0f);
  round_state(m.data(), m.size(), true);
  EXPECT_EQ(m[1], 0.0f);
}

TEST(State8, ABlockWithANaNIsNaN) {
  for (const bool is_signed : {true, false}) {
    std::vector<float> x(2 * kStateBlock, 0.5f);
    x[3] = std::numeric_limits<float>::quiet_NaN();
    x[4] = std::numeric_limits<float>::infinity();
    round_state(x.data(), x.size(), is_signed);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(std::isnan(x[i]), i < kStateBlock);
  }
}

TEST(State8, WhatIsInfiniteIsTheLargestNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kMost = std::numeric_limits<float>::max();
  std::mt19937_64 random(test::seed());
  for (const bool is_signed : {true, false}) {
    std::vector<float> x(2 * kStateBlock, 0.5f);
    x[3] = kInfinity;
    x[4] = -kInfinity;
    x[5] = kMost;
    check(x, is_signed, random);
    round_state(x.data(), x.size(), is_signed);
    EXPECT_EQ(x[3], kMost);
    EXPECT_EQ(x[4], is_signed ? -kMost : 0.0f);
    EXPECT_EQ(x[5], kMost);
    for (size_t i = 6; i < kStateBlock; ++i) EXPECT_TRUE(std::isfinite(x[i]));
    EXPECT_EQ(x[kStateBlock], 0.5f);
  }
}

// One square of a finite gradient is infinite: no parameter of its block becomes NaN.
TEST(State8, AHugeGradientLeavesItsBlockFinite) {
  constexpr size_t kElements = 300;
  std::vector<std::byte> memory[] = {std::vector<std::byte>(state8_bytes(kElements, 1)),
                                     std::vector<std::byte>(state8_bytes(kElements, 1))};
  std::vector<float> g(kElements, 0.5f), params(kElements, 1.0f), out(kElements);
  g[7] = 1e30f;
  for (uint64_t t = 1; t <= 3; ++t) {
    optimize(make_step(Optimizer::kAdam, default_hyper(Optimizer::kAdam), t), g.data(),
             params.data(), state8_in(memory[0].data(), kElements, Optimizer::kAdam, 0),
             state8_in(memory[1].data(), kElements, Optimizer::kAdam, 1), kElements, out.data(),
             DType::kF32, Store::kCached);
    for (const float p : params) EXPECT_TRUE(std::isfinite(p));
  }
}

// What a chunk of 8,192 elements takes of two states.
static_assert(2.0 * state8_bytes(8192, 1) / 8192 <= 2.1);

TEST(State8, ArraysOfChunksFollowEachOther) {
  std::vector<std::byte> memory(state8_bytes(1024, 3));
  const State8 all = state8_in(memory.data(), 1024, Optimizer::kAdam, 1);
  EXPECT_FALSE(all.is_signed);
  EXPECT_TRUE(state8_in(memory.data(), 1024, Optimizer::kAdam, 0).is_signed);
  EXPECT_EQ(static_cast<void*>(all.scales), memory.data() + 1024);
  EXPECT_EQ(static_cast<void*>(all.last + 3), memory.data() + memory.size());
  EXPECT_EQ(all.from(512).codes, all.codes + 512);
  EXPECT_EQ(all.from(512).scales, all.scales + 2);
  for (const std::string_view name : optimizer_names()) {
    const Optimizer o = *parse_optimizer(name);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(state8_in(memory.data(), 1024, o, i).is_signed, reference::is_signed_state(o, i))
          << name << i;
    }
  }
}

void check_step(Optimizer o, const Hyper& hyper, uint64_t t, size_t n, DType type, Store store,
                std::mt19937_64& random) {
  const bool signs[] = {reference::is_signed_state(o, 0), reference::is_signed_state(o, 1)};
  const std::vector<float> g = some(n, Values::kOrdinary, true, random);
  const std::vector<float> p = some(n, Values::kOrdinary, true, random);
  std::vector<float> states[2], before[2];
  for (size_t i = 0; i < 2; ++i) {
    states[i] = some(n, Values::kOrdinary, signs[i], random);
    reference::round_state(states[i], signs[i]);
    before[i] = states[i];
  }
  std::vector<float> params = p;
  reference::step(o, hyper, t, g.data(), params.data(), states[0].data(), states[1].data(), n);
  std::vector<uint32_t> out_wanted(n);
  reference::convert(params.data(), DType::kF32, out_wanted.data(), type, n);
  const size_t count = state_arrays(o, hyper);
  test::for_each_target([&] {
    Held held[] = {{n, signs[0], random}, {n, signs[1], random}};
    for (size_t i = 0; i < 2; ++i) encode_state(before[i].data(), n, held[i].state);
    Array to(p.data(), n * 4, random() % 16 * 4);
    Array out(n * bytes_of(type), random() % 16 * bytes_of(type));
    optimize(make_step(o, hyper, t), g.data(), to.as<float>(), count > 0 ? held[0].state : State8(),
             count > 1 ? held[1].state : State8(), n, out.data(), type, store);
    ASSERT_TRUE(to.holds(params.data()) && to.intact());
    ASSERT_TRUE(out.holds(out_wanted.data()) && out.intact());
    for (size_t i = 0; i < count; ++i) held[i].expect(reference::encode_state(states[i], signs[i]));
  });
}

TEST(State8, StepsOfEveryOptimizer) {
  std::mt19937_64 random(test::seed());
  for (const std::string_view name : optimizer_names()) {
    const Optimizer o = *parse_optimizer(name);
    if (o == Optimizer::kNone || o == Optimizer::kAdafactor) continue;
    Hyper hyper = default_hyper(o);
    hyper.weight_decay = 0.01;
    if (o == Optimizer::kRmsprop) hyper.rmsprop_momentum = 0.9;
    for (const size_t n : {1, 31, 256, 300, 1024, 1025, 2600}) {
      SCOPED_TRACE(::testing::Message()
                   << name << ", " << n << " elements, PHUB_SEED " << test::seed());
      const DType type = n % 2 ? DType::kBF16 : DType::kF32;
      check_step(o, hyper, 1 + n % 3, n, type, n < 300 ? Store::kCached : Store::kStreaming,
                 random);
      if (HasFailure()) return;
    }
  }
}

}  // namespace state8_test
}  // namespace phub::kernels
