// sum and find_nonfinite against the reference, bit for bit: every instruction set, format, number
// of slots, length and alignment.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/reference.h"

namespace phub::kernels {
namespace sum_test {

using test::Array;
using test::Values;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

struct Case {
  DType type;
  size_t slots;
  size_t elements;
  float factor;
  Values values;
};

// Slots at misaligned addresses of their own, and what their sum must be.
struct Input {
  Input(const Case& c, std::mt19937_64& random) : c(c), expected(c.elements) {
    const size_t element = bytes_of(c.type);
    for (size_t s = 0; s < c.slots; ++s) {
      arrays.emplace_back(c.elements * element, random() % 32 * element);
      for (size_t i = 0; i < c.elements; ++i) {
        reference::store(arrays.back().data(), c.type, i, test::make_value(random, c.values));
        // Signalling NaNs and payloads, which store() does not produce.
        if (c.values == Values::kAny && random() % 64 == 0) {
          const auto bits = static_cast<uint32_t>(random());
          std::memcpy(arrays.back().as<char>() + i * element, &bits, element);
        }
      }
      slots.push_back(arrays.back().data());
    }
    finite = reference::sum(slots, c.type, c.factor, expected.data(), c.elements);
    for (size_t s = 0; s < c.slots && nonfinite < 0; ++s) {
      for (size_t i = 0; i < c.elements; ++i) {
        if (!std::isfinite(reference::load(slots[s], c.type, i))) nonfinite = static_cast<int>(s);
      }
    }
    out_offset = random() % 16 * sizeof(float);
  }

  void check() {
    Array out(c.elements * sizeof(float), out_offset);
    ASSERT_EQ(sum(slots, c.type, c.factor, out.as<float>(), c.elements), finite);
    for (size_t i = 0; i < c.elements && !out.holds(expected.data()); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(out.as<float>()[i]), std::bit_cast<uint32_t>(expected[i]))
          << "element " << i;
    }
    ASSERT_TRUE(out.intact());
    ASSERT_EQ(find_nonfinite(slots, c.type, c.elements), nonfinite);
  }

  Case c;
  std::vector<Array> arrays;
  std::vector<const void*> slots;
  std::vector<float> expected;
  bool finite;
  int nonfinite = -1;
  size_t out_offset;
};

void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(::testing::Message()
               << name_of(c.type) << ", " << c.slots << " slots of " << c.elements << ", factor "
               << c.factor << ", values " << static_cast<int>(c.values) << ", PHUB_SEED "
               << test::seed());
  Input input(c, random);
  test::for_each_target([&] { input.check(); });
}

float factor_of(size_t n) {
  const float factors[] = {1.0f, 0.5f, 1.0f / 3, 1e-30f, 3e30f};
  return factors[n % 5];
}

TEST(Sum, EveryLength) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kTypes) {
    for (const size_t slots : {1, 2, 3, 4, 8, 17}) {
      for (size_t n = 0; n <= 300; ++n) {
        check({type, slots, n, factor_of(n), n % 2 ? Values::kFinite : Values::kAny}, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Sum, EveryNumberOfSlots) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kTypes) {
    for (size_t slots = 1; slots <= 40; ++slots) {
      for (const Values values : {Values::kOrdinary, Values::kFinite, Values::kAny}) {
        check({type, slots, 147, factor_of(slots), values}, random);
        if (HasFatalFailure()) return;
      }
    }
    check({type, 1024, 77, 1.0f / 1024, Values::kOrdinary}, random);
    if (HasFatalFailure()) return;
  }
}

TEST(Sum, AroundOneChunk) {
  std::mt19937_64 random(test::seed());
  for (const DType type : kTypes) {
    for (const size_t slots : {1, 4, 8, 17}) {
      for (const size_t n : {4095, 4096, 4097, 8175, 8191, 8192, 8193, 8209}) {
        check({type, slots, n, factor_of(n), Values::kOrdinary}, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Finite inputs whose sum overflows, and infinities that cancel into a NaN, in each position.
TEST(Sum, ReportsWhatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  test::for_each_target([&] {
    for (size_t n = 1; n < 140; ++n) {
      std::vector<float> a(n, 1.0f), b(n, 2.0f), out(n);
      const void* slots[] = {a.data(), b.data()};
      for (size_t at = 0; at < n; ++at) {
        ASSERT_TRUE(sum(slots, DType::kF32, 1.0f, out.data(), n));
        ASSERT_EQ(find_nonfinite(slots, DType::kF32, n), -1);
        a[at] = b[at] = largest;
        ASSERT_FALSE(sum(slots, DType::kF32, 1.0f, out.data(), n)) << at << " of " << n;
        ASSERT_EQ(out[at], infinity);
        ASSERT_EQ(find_nonfinite(slots, DType::kF32, n), -1);
        a[at] = 1.0f;
        b[at] = -infinity;
        ASSERT_FALSE(sum(slots, DType::kF32, 1.0f, out.data(), n));
        ASSERT_EQ(find_nonfinite(slots, DType::kF32, n), 1);
        a[at] = infinity;
        ASSERT_FALSE(sum(slots, DType::kF32, 1.0f, out.data(), n));
        ASSERT_EQ(std::bit_cast<uint32_t>(out[at]), 0x7FC00000u);
        ASSERT_EQ(find_nonfinite(slots, DType::kF32, n), 0);
        a[at] = 1.0f;
        b[at] = 2.0f;
      }
    }
  });
}

// Slots are added in groups of eight.
TEST(Sum, ReportsWhatIsNotFiniteInAnySlot) {
  test::for_each_target([&] {
    for (size_t count = 1; count < 20; ++count) {
      std::vector<std::vector<float>> values(count, std::vector<float>(37, 1.0f));
      std::vector<const void*> slots;
      for (const auto& slot : values) slots.push_back(slot.data());
      std::vector<float> out(37);
      for (size_t bad = 0; bad < count; ++bad) {
        values[bad][30] = std::numeric_limits<float>::quiet_NaN();
        ASSERT_FALSE(sum(slots, DType::kF32, 0.5f, out.data(), 37)) << bad << " of " << count;
        values[bad][30] = 1.0f;
      }
      ASSERT_TRUE(sum(slots, DType::kF32, 0.5f, out.data(), 37));
    }
  });
}

TEST(Sum, OfNoSlotsIsZero) {
  test::for_each_target([] {
    float out[3] = {1, 2, 3};
    EXPECT_TRUE(sum({}, DType::kF32, 2.0f, out, 3));
    for (const float value : out) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
  });
}

// A sum can go on in place.
TEST(Sum, TheFirstSlotMayBeTheOutput) {
  std::mt19937_64 random(test::seed());
  test::for_each_target([&random] {
    for (const size_t count : {1, 2, 8, 9, 20}) {
      std::vector<std::vector<float>> values(count, std::vector<float>(5003));
      std::vector<const void*> slots;
      for (auto& slot : values) {
        for (float& value : slot) value = test::make_value(random, Values::kOrdinary);
        slots.push_back(slot.data());
      }
      std::vector<float> expected(5003);
      reference::sum(slots, DType::kF32, 0.25f, expected.data(), expected.size());
      ASSERT_TRUE(sum(slots, DType::kF32, 0.25f, values[0].data(), values[0].size()));
      ASSERT_EQ(values[0], expected) << count << " slots, PHUB_SEED " << test::seed();
    }
  });
}

// The first slot is assigned, not added to +0.
TEST(Sum, KeepsNegativeZero) {
  test::for_each_target([] {
    const float zero = -0.0f;
    const void* slots[] = {&zero, &zero};
    float out = 1;
    EXPECT_TRUE(sum(slots, DType::kF32, 1.0f, &out, 1));
    EXPECT_EQ(std::bit_cast<uint32_t>(out), 0x80000000u);
  });
}

}  // namespace sum_test
}  // namespace phub::kernels
