// Slots of coded formats: what they hold, against the reference to the bit, with every instruction
// set.
#include "kernels/encode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/kernels/slots.h"

namespace phub::kernels {
namespace encode_test {

using reference::kCoded;
using test::Array;
using test::Values;

constexpr DType kScaled[] = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt32, DType::kInt8,
                             DType::kInt4};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Rounding random_rounding(std::mt19937_64& random) {
  return {.stochastic = true,
          .job = random(),
          .rank = random() % 1000,
          .round = random() % 1000000,
          .element = random() >> (random() % 64)};
}

// Encodes with every instruction set, from and to odd places.
struct Case {
  void check(std::mt19937_64& random) const {
    const size_t n = gradient.size();
    const size_t bytes = slot_bytes(type, n);
    SCOPED_TRACE(::testing::Message()
                 << name_of(type) << ", " << n << " elements, residual " << !residual.empty()
                 << ", stochastic " << rounding.stochastic << ", PHUB_SEED " << test::seed());
    std::vector<float> rest = residual;
    std::vector<uint8_t> expected(bytes);
    const bool finite = reference::encode(gradient, rest, type, rounding, expected.data());
    const size_t offsets[] = {random() % 16 * 4, random() % 16 * 4, random() % 16 * 4};
    test::for_each_target([&] {
      Array from(gradient.data(), n * 4, offsets[0]);
      Array kept(residual.data(), residual.size() * 4, offsets[1]);
      Array slot(bytes, offsets[2]);
      float* residual_or_null = residual.empty() ? nullptr : kept.as<float>();
      ASSERT_EQ(encode(from.as<float>(), residual_or_null, type, rounding, slot.data(), n), finite);
      for (size_t i = 0; i < bytes && !slot.holds(expected.data()); ++i) {
        ASSERT_EQ(int{slot.as<uint8_t>()[i]}, int{expected[i]}) << "byte " << i;
      }
      for (size_t i = 0; i < rest.size() && !kept.holds(rest.data()); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(kept.as<float>()[i]), std::bit_cast<uint32_t>(rest[i]))
            << "residual " << i;
      }
      ASSERT_TRUE(from.intact() && kept.intact() && slot.intact());
    });
  }

  DType type;
  std::vector<float> gradient, residual;
  Rounding rounding;
};

std::vector<float> values(size_t n, Values kind, std::mt19937_64& random) {
  std::vector<float> v(n);
  for (float& x : v) x = test::make_value(random, kind);
  return v;
}

TEST(Formats, Names) {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    const auto type = static_cast<DType>(i);
    EXPECT_EQ(parse_format(name_of(type)), type);
    EXPECT_EQ(is_plain(type), i < kPlainFormats);
  }
  for (const char* name :
       {"fp8-e4m3", "fp8-e5m2", "int32", "int8", "int4", "topk", "topk-10", "topk-100", "topk-1000",
        "topk-int4", "topk-10-int4", "topk-100-int4", "topk-1000-int4", "topk-int2", "topk-10-int2",
        "topk-100-int2", "topk-1000-int2"}) {
    ASSERT_TRUE(parse_format(name));
    EXPECT_EQ(name_of(*parse_format(name)), name);
  }
}

TEST(Formats, SizesOfSlots) {
  struct Known {
    DType type;
    size_t elements, bytes;
  };
  const Known known[] = {
      {DType::kF32, 5, 20},
      {DType::kBF16, 5, 10},
      {DType::kInt8, 0, 4},
      {DType::kInt8, 1, 8},
      {DType::kInt8, 4, 8},
      {DType::kFp8E4M3, 5, 12},
      {DType::kFp8E5M2, 8192, 8196},
      {DType::kInt4, 1, 8},
      {DType::kInt4, 8, 8},
      {DType::kInt4, 9, 12},
      {DType::kInt4, 8192, 4100},
      {DType::kTopK, 0, 0},
      {DType::kInt32, 0, 4},
      {DType::kInt32, 5, 24},
      {DType::kInt32, 8192, 32772},
      {DType::kTopK, 1, 4},
      {DType::kTopK, 7, 28},
      {DType::kTopK, 33, 32},
      {DType::kTopK, 256, 32},
      {DType::kTopK, 257, 36},
      {DType::kTopK10, 8192, 3280},
      {DType::kTopK100, 8192, 328},
      {DType::kTopK1000, 8192, 36},
      {DType::kTopKInt4, 0, 4},
      {DType::kTopKInt4, 1, 12},
      {DType::kTopKInt4, 7, 24},
      {DType::kTopK100Int4, 8192, 212},
      {DType::kTopK1000Int4, 8192, 32},
      {DType::kTopK10Int4, 8192, 2056},
      {DType::kTopKInt2, 0, 4},
      {DType::kTopKInt2, 1, 12},
      {DType::kTopKInt2, 7, 24},
      {DType::kTopKInt2, 8192, 580},
      {DType::kTopK10Int2, 8192, 1852},
      {DType::kTopK100Int2, 8192, 192},
      {DType::kTopK1000Int2, 8192, 28},
      {DType::kTopK, 8192, 1024},
      {DType::kTopK, 65536, 8192},
  };
  for (const Known& k : known) {
    EXPECT_EQ(slot_bytes(k.type, k.elements), k.bytes) << name_of(k.type) << ' ' << k.elements;
  }
}

TEST(FormatsDeathTest, OnlyPlainOnesHaveElements) {
  for (const DType type : kCoded) EXPECT_DEATH(bytes_of(type), "");
}

// From the formats' definitions, to hold the reference itself.
TEST(Reference, KnownCodes) {
  struct Known {
    DType type;
    uint32_t code;
    float value;
  };
  const Known known[] = {
      {DType::kFp8E4M3, 0x00, 0.0f},
      {DType::kFp8E4M3, 0x01, 0x1p-9f},
      {DType::kFp8E4M3, 0x07, 0x7p-9f},
      {DType::kFp8E4M3, 0x08, 0x1p-6f},
      {DType::kFp8E4M3, 0x38, 1.0f},
      {DType::kFp8E4M3, 0xB9, -1.125f},
      {DType::kFp8E4M3, 0x7E, 448},
      {DType::kFp8E4M3, 0xFE, -448},
      {DType::kFp8E5M2, 0x01, 0x1p-16f},
      {DType::kFp8E5M2, 0x04, 0x1p-14f},
      {DType::kFp8E5M2, 0x3C, 1.0f},
      {DType::kFp8E5M2, 0xBD, -1.25f},
      {DType::kFp8E5M2, 0x7B, 57344},
      {DType::kFp8E5M2, 0x7C, kInfinity},
      {DType::kFp8E5M2, 0xFC, -kInfinity},
      {DType::kInt32, 0x003FFFFF, 4194303},
      {DType::kInt32, 0xFFC00000, -4194304},
      {DType::kInt32, 0xFFFFFFFF, -1},
      {DType::kInt8, 0x7F, 127},
      {DType::kInt8, 0x80, -128},
      {DType::kInt8, 0xFF, -1},
      {DType::kInt4, 0x07, 7},
      {DType::kInt4, 0x08, -8},
      {DType::kInt4, 0x0F, -1},
  };
  for (const Known& k : known) {
    EXPECT_EQ(reference::value_of_code(k.type, k.code), k.value)
        << name_of(k.type) << ' ' << +k.code;
  }
  for (const uint8_t code : {0x7F, 0xFF}) {
    EXPECT_TRUE(std::isnan(reference::value_of_code(DType::kFp8E4M3, code)));
  }
  for (const uint8_t code : {0x7D, 0x7E, 0x7F, 0xFD}) {
    EXPECT_TRUE(std::isnan(reference::value_of_code(DType::kFp8E5M2, code)));
  }
  EXPECT_EQ(reference::scale_of(DType::kFp8E4M3, 448), 1);
  EXPECT_EQ(reference::scale_of(DType::kFp8E4M3, 449), 2);
  EXPECT_EQ(reference::scale_of(DType::kFp8E4M3, 224), 0.5f);
  EXPECT_EQ(reference::scale_of(DType::kFp8E5M2, 57344), 1);
  for (const uint32_t code : {0x00400000u, 0xFFBFFFFFu, 0x7FFFFFFFu, 0x80000000u}) {
    EXPECT_TRUE(std::isnan(reference::value_of_code(DType::kInt32, code)));
  }
  EXPECT_EQ(reference::scale_of(DType::kInt32, 4194303), 1);
  EXPECT_EQ(reference::scale_of(DType::kInt32, 4194304), 2);
  EXPECT_EQ(reference::scale_of(DType::kInt32, 1), 0x1p-21f);
  EXPECT_EQ(reference::scale_of(DType::kInt8, 254), 2);
  EXPECT_EQ(reference::scale_of(DType::kInt4, 7), 1);
}

TEST(Decode, EveryCode) {
  const float scales[] = {1,      0.37f,    -3.0f,   0,    -0.0f,     0x1p-126f,
                          1e-42f, 0x1p119f, 3.4e38f, kNaN, kInfinity, 0x1p-149f};
  for (const DType type : kScaled) {
    for (const float scale : scales) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << ", scale " << scale);
      const size_t n = type == DType::kInt4 ? 512 : type == DType::kInt32 ? 64 : 256;
      std::vector<uint8_t> slot(slot_bytes(type, n));
      for (size_t i = 0; i < 256; ++i) slot[i] = static_cast<uint8_t>(i);
      std::memcpy(slot.data() + 256, &scale, 4);
      std::vector<float> expected = reference::decode(slot.data(), type, n);
      test::for_each_target([&] {
        std::vector<float> out(n);
        decode(slot.data(), type, out.data(), n);
        for (size_t i = 0; i < n; ++i) {
          if (std::isnan(expected[i])) {
            ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), 0x7FC00000u) << i;
          } else {
            ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected[i])) << i;
          }
        }
      });
    }
  }
}

TEST(Encode, EveryLength) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (size_t n = 0; n <= 300; ++n) {
      for (const bool stochastic : {false, true}) {
        Case c{.type = type};
        const Values kind = n % 3 == 0 ? Values::kOrdinary : Values::kFinite;
        c.gradient = values(n, kind, random);
        if (random() % 2 == 0) c.residual = values(n, kind, random);
        if (stochastic) c.rounding = random_rounding(random);
        c.check(random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Magnitudes over the whole range, also in one chunk.
TEST(Encode, EveryMagnitude) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (uint32_t exponent = 0; exponent < 255; ++exponent) {
      Case c{.type = type};
      c.gradient.resize(77);
      for (float& x : c.gradient) {
        const uint32_t below = std::min<uint32_t>(exponent, random() % 12);
        const auto rest = static_cast<uint32_t>(random()) & 0x807FFFFF;
        x = std::bit_cast<float>((exponent - below) << 23 | rest);
      }
      if (exponent % 2 == 0) c.rounding = random_rounding(random);
      if (exponent % 3 == 0) c.residual.assign(77, 0.0f);
      c.check(random);
      if (HasFatalFailure()) return;
      std::vector<uint8_t> slot(slot_bytes(type, 77));
      std::vector<float> out(77);
      ASSERT_TRUE(encode(c.gradient.data(), nullptr, type, c.rounding, slot.data(), 77));
      decode(slot.data(), type, out.data(), 77);
      for (const float x : out) ASSERT_TRUE(std::isfinite(x)) << name_of(type) << ' ' << exponent;
    }
  }
}

TEST(Encode, AroundTheBordersOfScales) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kScaled) {
    const float largest = type == DType::kFp8E4M3   ? 448
                          : type == DType::kFp8E5M2 ? 57344
                          : type == DType::kInt32   ? 4194303
                          : type == DType::kInt8    ? 127
                                                    : 7;
    for (int exponent = -149; exponent < 128; ++exponent) {
      const float border = std::ldexp(largest, exponent);
      if (!std::isfinite(border)) break;
      for (const float x :
           {std::nextafter(border, 0.0f), border, std::nextafter(border, kInfinity)}) {
        Case c{.type = type, .gradient = {x, -x / 3, x / 2, x / 1000}};
        if (!std::isfinite(x)) continue;
        c.check(random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Encode, LargeChunks) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (const size_t n : {8191, 8192, 8193, 65535, 65536}) {
      Case c{.type = type};
      c.gradient = values(n, Values::kOrdinary, random);
      c.residual = values(n, Values::kFinite, random);
      if (n % 2 == 0) c.rounding = random_rounding(random);
      c.check(random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Encode, WhatIsNotFiniteIsSaidAndLeavesTheResidual) {
  std::mt19937_64 random(test::seed());
  const float payload = std::bit_cast<float>(0xFFA00001u);
  for (const DType type : kCoded) {
    for (const size_t n : {1, 5, 16, 37, 100}) {
      for (size_t at = 0; at < n; ++at) {
        Case c{.type = type};
        c.gradient = values(n, Values::kOrdinary, random);
        if (at % 2 == 0) c.residual = values(n, Values::kOrdinary, random);
        const float bad[] = {kNaN, kInfinity, -kInfinity, payload};
        c.gradient[at] = bad[random() % 4];
        c.gradient[random() % n] = bad[random() % 4];
        c.check(random);
        if (HasFatalFailure()) return;
        std::vector<uint8_t> slot(slot_bytes(type, n)), good(slot_bytes(type, n));
        std::vector<float> out(n), kept = c.residual, zeros(n);
        ASSERT_FALSE(encode(c.gradient.data(), kept.empty() ? nullptr : kept.data(), type, {},
                            slot.data(), n));
        ASSERT_EQ(kept, c.residual);
        ASSERT_TRUE(encode(zeros.data(), nullptr, type, {}, good.data(), n));
        const void* slots[] = {good.data(), slot.data()};
        ASSERT_FALSE(sum(slots, type, 0.5f, out.data(), n));
        ASSERT_EQ(find_nonfinite(slots, type, n), 1);
      }
    }
    // A sum that overflows.
    const float most = std::numeric_limits<float>::max();
    float rest = most;
    std::vector<uint8_t> slot(slot_bytes(type, 1));
    ASSERT_FALSE(encode(&most, &rest, type, {}, slot.data(), 1));
    ASSERT_EQ(rest, most);
  }
}

TEST(Encode, ZerosAreZeros) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (const bool stochastic : {false, true}) {
      Case c{.type = type, .gradient = std::vector<float>(70, 0.0f)};
      for (size_t i = 0; i < 70; i += 3) c.gradient[i] = -0.0f;
      c.residual.assign(70, -0.0f);
      c.rounding.stochastic = stochastic;
      c.check(random);
      std::vector<uint8_t> slot(slot_bytes(type, 70));
      std::vector<float> out(70, 1.0f);
      ASSERT_TRUE(encode(c.gradient.data(), nullptr, type, c.rounding, slot.data(), 70));
      decode(slot.data(), type, out.data(), 70);
      EXPECT_EQ(out, std::vector<float>(70, 0.0f));
    }
  }
}

// Over many rounds nothing is lost: what was sent and what is left are what came in, exactly.
TEST(Encode, SentAndResidualAreWhatCameIn) {
  std::mt19937_64 random(test::seed());
  constexpr size_t kElements = 100;
  for (const DType type : kCoded) {
    for (const bool stochastic : {false, true}) {
      std::vector<float> residual(kElements), sent(kElements);
      std::vector<double> came(kElements), went(kElements);
      for (uint64_t round = 0; round < 200; ++round) {
        std::vector<float> gradient(kElements);
        for (float& g : gradient) g = static_cast<float>(int(random() % 2001) - 1000);
        // One element makes the scale a power of two.
        gradient[0] = (name_of(type).ends_with("int4") ? 7.0f * 1024 : 127.0f * 64) - residual[0];
        std::vector<uint8_t> slot(slot_bytes(type, kElements));
        ASSERT_TRUE(encode(gradient.data(), residual.data(), type,
                           {.stochastic = stochastic, .round = round}, slot.data(), kElements));
        decode(slot.data(), type, sent.data(), kElements);
        for (size_t i = 0; i < kElements; ++i) {
          came[i] += gradient[i];
          went[i] += sent[i];
          ASSERT_EQ(came[i], went[i] + residual[i])
              << name_of(type) << ", element " << i << ", round " << round;
        }
      }
      EXPECT_GT(std::count_if(went.begin(), went.end(), [](double x) { return x != 0; }), 50);
    }
  }
}

// The mean of what is sent is the element, over each of what the random numbers depend on.
TEST(Encode, StochasticRoundingIsUnbiased) {
  const size_t draws = 200000;
  for (const DType type : kCoded) {
    for (const int over : {0, 1, 2, 3}) {
      const size_t n = 6;
      const float step = format_of(type).coding == Coding::kSparse         ? 0x1p-7f
                         : format_of(type).coding == Coding::kSparseLevels ? 1.0f
                         : type == DType::kInt8                            ? 1 / 127.0f
                                                                           : 1 / 4.0f;
      std::vector<float> x = {1.0f, 0.3f, -0.3f, 0.0123f, -0.77f, 0.5002f};
      std::vector<double> total(n);
      std::vector<float> out(n);
      std::vector<uint8_t> slot(slot_bytes(type, n));
      for (size_t draw = 0; draw < draws; ++draw) {
        Rounding rounding{.stochastic = true, .job = 7, .rank = 3, .round = 11, .element = 500};
        (over == 0   ? rounding.job
         : over == 1 ? rounding.rank
         : over == 2 ? rounding.round
                     : rounding.element) += draw * (over == 3 ? n : 1);
        ASSERT_TRUE(encode(x.data(), nullptr, type, rounding, slot.data(), n));
        decode(slot.data(), type, out.data(), n);
        for (size_t i = 0; i < n; ++i) total[i] += out[i];
      }
      // A draw is off by a step at most: five standard deviations of the mean.
      const double limit = 5 * 0.5 * step / std::sqrt(double(draws));
      for (size_t i = 0; i < n; ++i) {
        EXPECT_NEAR(total[i] / double(draws), x[i], limit)
            << name_of(type) << ' ' << i << ' ' << over;
      }
    }
  }
}

TEST(Encode, OfEqualMagnitudesTheFirstAreSent) {
  std::mt19937_64 random(test::seed());
  for (const size_t n : {1, 31, 32, 33, 64, 100, 320, 5000}) {
    for (const int kinds : {1, 2, 3, 10, 40}) {
      Case c{.type = DType::kTopK};
      c.gradient.resize(n);
      for (float& x : c.gradient) x = static_cast<float>(int(random() % (2 * kinds)) - kinds);
      c.check(random);
      if (HasFatalFailure()) return;
      c.gradient.assign(n, random() % 2 == 0 ? 3.0f : -3.0f);
      c.check(random);
      std::vector<uint32_t> slot(top_k(DType::kTopK, n));
      ASSERT_TRUE(encode(c.gradient.data(), nullptr, DType::kTopK, {}, slot.data(), n));
      for (size_t e = 0; e < slot.size(); ++e) ASSERT_EQ(slot[e] & 0xFFFF, e);
    }
  }
}

}  // namespace encode_test
}  // namespace phub::kernels
