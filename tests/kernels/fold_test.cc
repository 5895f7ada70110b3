// Folds give the bits of the same in plain C++, whatever the words are, on every instruction set.
#include "kernels/fold.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/oracle/folds.h"
#include "tests/seeds.h"

namespace phub::kernels {
namespace fold_test {

using test::Array;

constexpr const char* kTypes[] = {"f32", "f64", "i32", "i64"};
constexpr const char* kOperations[] = {"add", "multiply", "min", "max", "or"};

template <class Visit>
void for_each_fold(const Visit& visit) {
  for (const char* type : kTypes) {
    for (const char* operation : kOperations) {
      const std::optional<Fold> fold = parse_fold(type, operation);
      if (!fold) continue;
      SCOPED_TRACE(std::string(operation) + " of " + type);
      visit(*fold, reference::Fold({.operation = operation, .value_type = type}));
    }
  }
}

// Random bits; small numbers, which are often equal; zeros of both signs, infinities and NaNs.
void fill(std::mt19937_64& random, const Fold& fold, void* to, size_t words) {
  const bool is_float = fold.type == ValueType::kF32 || fold.type == ValueType::kF64;
  const double kHard[] = {0.0, -0.0, HUGE_VAL, -HUGE_VAL, NAN, 1.5, -3.0};
  for (size_t i = 0; i < words; i += words_of(fold.type)) {
    uint64_t bits = random();
    if (bits % 3 == 0) bits = random() % 5 - 2;
    const double hard = kHard[random() % 7];
    if (is_float && random() % 4 == 0) {
      bits = words_of(fold.type) == 2 ? std::bit_cast<uint64_t>(hard)
                                      : std::bit_cast<uint32_t>(static_cast<float>(hard));
    }
    std::memcpy(static_cast<std::byte*>(to) + i * 4, &bits, words_of(fold.type) * 4);
  }
}

void check(uint64_t seed) {
  std::mt19937_64 random(seed);
  for_each_fold([&](const Fold& fold, const reference::Fold& expected) {
    const size_t words = random() % 200 * words_of(fold.type);
    Array from(words * 4, random() % 16 * 4), to(words * 4, random() % 16 * 4);
    fill(random, fold, from.as<float>(), words);
    fill(random, fold, to.as<float>(), words);
    std::vector<float> want(to.as<float>(), to.as<float>() + words);
    expected.add({from.as<float>(), words}, want);
    kernels::fold(fold, from.as<float>(), to.as<float>(), words);
    ASSERT_TRUE(words == 0 || std::memcmp(want.data(), to.as<float>(), words * 4) == 0)
        << "seed " << seed << ", " << words << " words";
  });
}

TEST(Folds, AreTheBitsOfPlainCode) {
  const auto seeds = testing::fresh_seeds(60);
  test::for_each_target([&] {
    for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) check(seed);
  });
}

TEST(Folds, AnIdentityChangesNothing) {
  std::mt19937_64 random(std::random_device{}());
  for_each_fold([&](const Fold& fold, const reference::Fold& expected) {
    constexpr size_t kWords = 74;
    std::vector<float> identity(kWords), values(kWords);
    fill_with_identity(fold, identity.data(), kWords);
    const std::vector<float> want = expected.identity(kWords);
    EXPECT_EQ(std::memcmp(want.data(), identity.data(), kWords * 4), 0);
    fill(random, fold, values.data(), kWords);
    kernels::fold(fold, values.data(), identity.data(), kWords);  // one kind of NaN from here on
    const std::vector<float> before = identity;
    kernels::fold(fold, want.data(), identity.data(), kWords);
    EXPECT_EQ(std::memcmp(before.data(), identity.data(), kWords * 4), 0);
  });
}

TEST(ParseFold, KnowsThemAll) {
  size_t known = 0;
  for_each_fold([&](const Fold&, const reference::Fold&) { ++known; });
  EXPECT_EQ(known, 18u);
  EXPECT_FALSE(parse_fold("f64", "or"));
  EXPECT_FALSE(parse_fold("f16", "add"));
  EXPECT_FALSE(parse_fold("i32", "xor"));
  EXPECT_FALSE(parse_fold("", ""));
}

}  // namespace fold_test
}  // namespace phub::kernels
