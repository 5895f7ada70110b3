// Number formats: all 65,536 values of the short ones, and f32 values around every rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace convert_test {

using test::Array;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// From the formats' definitions, to hold the reference itself.
TEST(Reference, KnownValues) {
  struct Known {
    float value;
    uint16_t bf16, f16;
  };
  const float infinity = std::numeric_limits<float>::infinity();
  const Known known[] = {
      {0.0f, 0x0000, 0x0000},
      {-0.0f, 0x8000, 0x8000},
      {1.0f, 0x3F80, 0x3C00},
      {-2.0f, 0xC000, 0xC000},
      {1.5f, 0x3FC0, 0x3E00},
      {65504.0f, 0x4780, 0x7BFF},    // the largest f16
      {65519.996f, 0x4780, 0x7BFF},  // the last that rounds down to it
      {65520.0f, 0x4780, 0x7C00},    // a tie, to even, which is infinity
      {infinity, 0x7F80, 0x7C00},
      {-infinity, 0xFF80, 0xFC00},
      {std::ldexp(1.0f, -14), 0x3880, 0x0400},  // the smallest normal f16
      {std::ldexp(1.0f, -24), 0x3380, 0x0001},  // the smallest subnormal f16
      {std::ldexp(1.0f, -25), 0x3300, 0x0000},  // half of it: a tie, to even
      {std::ldexp(1.5f, -25), 0x3340, 0x0001},
      {std::ldexp(1.0f, -126), 0x0080, 0x0000},             // the smallest normal f32 and bf16
      {std::ldexp(1.0f, -133), 0x0001, 0x0000},             // the smallest subnormal bf16
      {std::bit_cast<float>(0x3F808000u), 0x3F80, 0x3C04},  // ties of bf16, to even
      {std::bit_cast<float>(0x3F818000u), 0x3F82, 0x3C0C},
      {std::bit_cast<float>(0x3F808001u), 0x3F81, 0x3C04},
      {std::numeric_limits<float>::max(), 0x7F80, 0x7C00},
      {std::bit_cast<float>(0xFFA00001u), 0x7FC0, 0x7E00},
  };
  for (const Known& k : known) {
    uint16_t bf16, f16;
    reference::store(&bf16, DType::kBF16, 0, k.value);
    reference::store(&f16, DType::kF16, 0, k.value);
    EXPECT_EQ(bf16, k.bf16) << k.value;
    EXPECT_EQ(f16, k.f16) << k.value;
  }
}

// What a format can hold survives the way to f32 and back.
TEST(Reference, RoundTrips) {
  for (const DType type : {DType::kBF16, DType::kF16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const auto in = static_cast<uint16_t>(bits);
      uint16_t out;
      const float value = reference::load(&in, type, 0);
      reference::store(&out, type, 0, value);
      ASSERT_EQ(out, std::isnan(value) ? (type == DType::kBF16 ? 0x7FC0 : 0x7E00) : in) << bits;
    }
  }
}

void expect_conversion(const void* from, DType from_type, DType to_type, size_t n) {
  SCOPED_TRACE(::testing::Message() << name_of(from_type) << " to " << name_of(to_type));
  std::vector<uint32_t> expected(n), out(n);
  if (from_type == to_type) {  // A copy of the bytes.
    std::memcpy(expected.data(), from, n * bytes_of(from_type));
  } else {
    reference::convert(from, from_type, expected.data(), to_type, n);
  }
  test::for_each_target([&] {
    convert(from, from_type, out.data(), to_type, n);
    ASSERT_EQ(std::memcmp(expected.data(), out.data(), n * bytes_of(to_type)), 0);
  });
}

TEST(Convert, EveryShortValue) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const DType from : {DType::kBF16, DType::kF16}) {
    for (const DType to : kTypes) expect_conversion(all.data(), from, to, all.size());
  }
}

// All exponents, with the upper fraction bits counted through and the lower ones at the borders.
TEST(Convert, FloatsAroundEveryRounding) {
  std::vector<uint32_t> bits;
  for (uint32_t upper = 0; upper < (1u << 18); ++upper) {
    for (const uint32_t lower : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x2000u, 0x3FFFu}) {
      bits.push_back((upper << 14) | lower);
    }
  }
  for (const DType to : kTypes) expect_conversion(bits.data(), DType::kF32, to, bits.size());
}

TEST(Convert, EveryLengthAndAlignment) {
  std::mt19937_64 random(test::seed());
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (size_t n = 0; n <= 100; ++n) {
        SCOPED_TRACE(::testing::Message() << name_of(from) << " to " << name_of(to) << ", " << n
                                          << " elements, PHUB_SEED " << test::seed());
        Array in(n * bytes_of(from), random() % 32 * bytes_of(from));
        for (size_t i = 0; i < n; ++i) {
          reference::store(in.data(), from, i, test::make_value(random, test::Values::kAny));
        }
        std::vector<uint32_t> expected(n);
        reference::convert(in.data(), from, expected.data(), to, n);
        const size_t offset = random() % 32 * bytes_of(to);
        test::for_each_target([&] {
          Array out(n * bytes_of(to), offset);
          convert(in.data(), from, out.data(), to, n);
          ASSERT_TRUE(out.holds(expected.data()));
          ASSERT_TRUE(out.intact());
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(FormatNames, RoundTrip) {
  for (const DType type : kTypes) EXPECT_EQ(parse_dtype(name_of(type)), type);
  EXPECT_EQ(parse_dtype("f64"), std::nullopt);
  EXPECT_EQ(parse_dtype(""), std::nullopt);
}

}  // namespace convert_test
}  // namespace phub::kernels
