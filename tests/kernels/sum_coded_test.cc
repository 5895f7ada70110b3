// sum and find_nonfinite of coded slots against the reference, bit for bit: every instruction set,
// format, number of slots, length and alignment; slots that an encoder wrote, and slots of any
// bytes.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/kernels/slots.h"

namespace phub::kernels {
namespace sum_coded_test {

using reference::kCoded;
using test::Array;
using test::Values;

void fill(Array& slot, DType type, size_t n, bool any_bytes, std::mt19937_64& random) {
  if (any_bytes) {
    for (size_t i = 0; i < slot_bytes(type, n); ++i) {
      slot.as<uint8_t>()[i] = static_cast<uint8_t>(random());
    }
    return;
  }
  std::vector<float> gradient(n);
  for (float& x : gradient) x = test::make_value(random, Values::kFinite);
  reference::encode(gradient, {}, type, {}, slot.data());
}

void check(DType type, size_t count, size_t n, float factor, bool any_bytes,
           std::mt19937_64& random) {
  SCOPED_TRACE(::testing::Message()
               << name_of(type) << ", " << count << " slots of " << n << ", factor " << factor
               << ", any bytes " << any_bytes << ", PHUB_SEED " << test::seed());
  std::vector<Array> arrays;
  std::vector<const void*> slots;
  int nonfinite = -1;
  for (size_t s = 0; s < count; ++s) {
    arrays.emplace_back(slot_bytes(type, n), random() % 16 * 4);
    fill(arrays.back(), type, n, any_bytes && random() % 4 == 0, random);
    slots.push_back(arrays.back().data());
    if (nonfinite < 0 && !reference::is_finite(slots[s], type, n)) nonfinite = static_cast<int>(s);
  }
  std::vector<float> expected(n);
  const bool finite = reference::sum_coded(slots, type, factor, expected.data(), n);
  const size_t offset = random() % 16 * 4;
  test::for_each_target([&] {
    Array out(n * 4, offset);
    ASSERT_EQ(sum(slots, type, factor, out.as<float>(), n), finite);
    for (size_t i = 0; i < n && !out.holds(expected.data()); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(out.as<float>()[i]), std::bit_cast<uint32_t>(expected[i]))
          << "element " << i;
    }
    ASSERT_TRUE(out.intact());
    ASSERT_EQ(find_nonfinite(slots, type, n), nonfinite);
  });
}

float factor_of(size_t n) {
  const float factors[] = {1.0f, 0.5f, 1.0f / 3, 1e-30f, -3e30f};
  return factors[n % 5];
}

TEST(SumCoded, EveryLength) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (const size_t count : {1, 2, 7, 8, 9, 17}) {
      for (size_t n = 0; n <= 200; ++n) {
        check(type, count, n, factor_of(n), n % 2 == 0, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(SumCoded, EveryNumberOfSlots) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (size_t count = 1; count <= 40; ++count) {
      check(type, count, 147, factor_of(count), count % 2 == 0, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SumCoded, AroundOneChunk) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kCoded) {
    for (const size_t count : {1, 2, 7, 8, 9, 17}) {
      for (const size_t n : {4095, 4096, 4097, 8191, 8192, 8193}) {
        check(type, count, n, factor_of(n), false, random);
        if (HasFatalFailure()) return;
      }
    }
    check(type, 3, 65536, 0.5f, false, random);
  }
}

TEST(SumCoded, OfNoSlotsIsZero) {
  for (const DType type : kCoded) {
    float out[3] = {1, 2, 3};
    EXPECT_TRUE(sum({}, type, 2.0f, out, 3));
    for (const float value : out) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
  }
}

// A slot comes off the network.
TEST(SumCoded, AnIndexOutsideIsNotFiniteAndWritesNothingElse) {
  test::for_each_target([] {
    for (const size_t n : {1, 31, 40, 8192}) {
      std::vector<uint32_t> good(top_k(DType::kTopK, n)), bad(good.size());
      for (size_t e = 0; e < good.size(); ++e) {
        good[e] = bad[e] = 0x3F800000 | static_cast<uint32_t>(e);
      }
      bad.back() = 0x3F800000 | static_cast<uint32_t>(n);
      Array out(n * 4, 4);
      const void* slots[] = {good.data(), good.data(), bad.data()};
      ASSERT_FALSE(sum(slots, DType::kTopK, 1.0f, out.as<float>(), n));
      ASSERT_TRUE(out.intact());
      ASSERT_EQ(std::bit_cast<uint32_t>(out.as<float>()[n - 1]), 0x7FC00000u);
      ASSERT_EQ(find_nonfinite(slots, DType::kTopK, n), 2);
      ASSERT_EQ(find_nonfinite({slots, 2}, DType::kTopK, n), -1);
    }
  });
}

TEST(SumCoded, WhatNobodySentIsZero) {
  test::for_each_target([] {
    std::vector<uint32_t> slot = {0xC0000000 | 3, 0x40400000 | 50, 60, 60, 61, 61, 62, 63};
    const void* slots[] = {slot.data(), slot.data()};
    std::vector<float> out(64, 9.0f);
    ASSERT_TRUE(sum(slots, DType::kTopK, 0.5f, out.data(), 64));
    for (size_t i = 0; i < 64; ++i) {
      const float expected = i == 3 ? -2.0f : i == 50 ? 3.0f : 0.0f;
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  });
}

}  // namespace sum_coded_test
}  // namespace phub::kernels
