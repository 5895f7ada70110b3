// The sum over a tree of ranks against the reference's, bit for bit.
#include "phub/core/tree_sum.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/oracle/groups.h"
#include "tests/seeds.h"

namespace phub {
namespace tree_sum_test {

using kernels::DType;

// The gradients of some ranks, in order.
struct Gradients {
  std::vector<std::vector<std::byte>> all;  // by rank; empty: it has none
  std::vector<const void*> slots, by_rank;
  std::vector<uint32_t> ranks;

  void add(std::vector<std::byte> gradient) {
    all.push_back(std::move(gradient));
    by_rank.push_back(all.back().empty() ? nullptr : all.back().data());
    if (all.back().empty()) return;
    slots.push_back(all.back().data());
    ranks.push_back(static_cast<uint32_t>(all.size() - 1));
  }
  // The same times a weight for each rank, in f32.
  Gradients times(const std::vector<float>& weights, DType type) const {
    Gradients out;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      std::vector<std::byte> product;
      const size_t elements = all[rank].size() / kernels::bytes_of(type);
      product.resize(elements * sizeof(float));
      for (size_t i = 0; i < elements; ++i) {
        const float value = reference::load(all[rank].data(), type, i);
        reference::store(product.data(), DType::kF32, i, value * weights[rank]);
      }
      out.add(std::move(product));
    }
    return out;
  }
};

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// One value per rank, or nothing; the sum in f32.
float sum_of(const std::string& groups, const std::vector<std::optional<float>>& values) {
  const auto ranks = static_cast<uint32_t>(values.size());
  const RankTree tree(groups, ranks);
  TreeSum sum(tree, 1, false);
  std::vector<const void*> slots;
  std::vector<uint32_t> who;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (!values[rank]) continue;
    slots.push_back(&*values[rank]);
    who.push_back(rank);
  }
  float out = 77;
  sum.add({slots, who}, {.elements = 1}, 1, &out);
  return out;
}

// By hand: what is too small to change 1 alone does so as a group.
TEST(TreeSum, GroupsGiveOtherBits) {
  constexpr float kSmall = 0x1p-24f, kNext = 1 + 0x1p-23f;
  const std::vector<std::optional<float>> three = {1, kSmall, kSmall};
  EXPECT_EQ(sum_of("1,1,1", three), 1);
  EXPECT_EQ(sum_of("1,(1,1)", three), kNext);
  const std::vector<std::optional<float>> four = {1, kSmall, kSmall, kSmall};
  EXPECT_EQ(sum_of("", four), 1);
  EXPECT_EQ(sum_of("4", four), 1);
  EXPECT_EQ(sum_of("1,1,1,1", four), 1);
  EXPECT_EQ(sum_of("2,2", four), kNext);
  EXPECT_EQ(sum_of("1,3", four), 1 + 0x1p-22f) << "1 + 3 * 2^-24, rounded to even";
  EXPECT_EQ(sum_of("3,1", four), 1);
  const std::vector<std::optional<float>> five = {kSmall, 1, kSmall, kSmall, -1};
  EXPECT_EQ(sum_of("", five), 0);
  EXPECT_EQ(sum_of("(1,1),(2,1)", five), 0x1p-23f);
  EXPECT_EQ(sum_of("(2,2),1", five), 0x1p-23f);
  EXPECT_EQ(sum_of("2,2,1", five), 0x1p-23f);
}

TEST(TreeSum, WhoHasNoGradientIsLeftOut) {
  constexpr float kSmall = 0x1p-24f;
  EXPECT_EQ(sum_of("2,2", {std::nullopt, 1, kSmall, kSmall}), 1 + 0x1p-23f);
  EXPECT_EQ(sum_of("2,2", {1, std::nullopt, kSmall, std::nullopt}), 1);
  EXPECT_EQ(sum_of("1,2,1", {5, std::nullopt, std::nullopt, 2}), 7);
  EXPECT_EQ(sum_of("1,2,1", {std::nullopt, 2, 3, std::nullopt}), 5);
  EXPECT_EQ(sum_of("2,2", std::vector<std::optional<float>>(4)), 0);
}

TEST(TreeSum, KeepsNegativeZero) {
  for (const char* groups : {"2,2", "(1,1),(1,1)", "1,(1,2)"}) {
    EXPECT_TRUE(std::signbit(sum_of(groups, {-0.0f, -0.0f, -0.0f, -0.0f}))) << groups;
    EXPECT_TRUE(std::signbit(sum_of(groups, {{}, {}, {}, -0.0f}))) << groups;
    EXPECT_FALSE(std::signbit(sum_of(groups, {{}, -0.0f, {}, 0.0f}))) << groups;
  }
}

// Trees, participation, formats, sizes and factors are drawn; now and then a number is not finite,
// or a sum is not.
TEST(TreeSum, IsTheReferences) {
  const auto seeds = testing::fresh_seeds(400);
  size_t other_than_flat = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&random](uint64_t n) { return random() % n; };
    const auto ranks = static_cast<uint32_t>(1 + below(below(4) == 0 ? 70 : 12));
    const std::string groups = reference::some_groups(ranks, below);
    SCOPED_TRACE(fmt::format("PHUB_SEED={}, groups {}", seed, groups));
    const auto type = static_cast<DType>(below(3));
    const size_t elements = 1 + below(600), largest = elements + below(3) * 16;
    const float factor = below(2) == 0 ? 1 : 1 / static_cast<float>(1 + below(10));
    const uint64_t of_eight = 1 + below(8);  // have gradients
    Gradients gradients;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::byte> gradient;
      if (below(8) < of_eight) gradient.resize(elements * kernels::bytes_of(type));
      for (size_t i = 0; i < elements && !gradient.empty(); ++i) {
        const float value = static_cast<float>(below(2001)) / 1000 - 1;
        reference::store(gradient.data(), type, i, std::ldexp(value, -static_cast<int>(below(20))));
      }
      if (below(100) == 0 && !gradient.empty()) {
        constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                                  -std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN(), 3.3e38f};
        reference::store(gradient.data(), type, below(elements), kBad[below(4)]);
      }
      gradients.add(std::move(gradient));
    }
    const RankTree tree(groups, ranks);
    const bool weighs = below(2) == 0;
    const uint64_t ones_of_four = below(5);  // have the weight 1
    std::vector<float> weights, of_slots;    // of the ranks, and of those that have gradients
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const float weight = static_cast<float>(1 + below(2000)) / static_cast<float>(1 + below(30));
      weights.push_back(below(4) < ones_of_four ? 1 : weight);
    }
    for (const uint32_t rank : gradients.ranks) of_slots.push_back(weights[rank]);
    const Gradients products = gradients.times(weights, type);
    const Gradients& alike = weighs ? products : gradients;
    const DType dtype = weighs ? DType::kF32 : type;
    TreeSum tree_sum(tree, largest, weighs);
    std::vector<float> sum(elements, 99), expected(elements), flat(elements);
    const bool finite = reference::sum(reference::parse_groups(groups, ranks), alike.by_rank, dtype,
                                       factor, expected.data(), elements);
    EXPECT_EQ(tree_sum.add({gradients.slots, gradients.ranks,
                            weighs ? std::span<const float>(of_slots) : std::span<const float>()},
                           {.elements = elements, .dtype = type}, factor, sum.data()),
              finite);
    EXPECT_EQ(bits_of(sum), bits_of(expected));
    reference::sum(alike.slots, dtype, factor, flat.data(), elements);
    if (bits_of(flat) != bits_of(expected)) ++other_than_flat;
  }
  if (seeds.count > 1) {
    EXPECT_GT(other_than_flat, seeds.count / 8);
  }
}

// The reference itself, where there are no groups.
TEST(TreeSum, TheReferenceWithoutGroupsAddsInRankOrder) {
  std::mt19937_64 random(7);
  std::vector<float> values(9);
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000 - 1;
  std::vector<const void*> slots;
  for (const float& value : values) slots.push_back(&value);
  float tree = 0, list = 0;
  reference::sum(reference::parse_groups("", 9), slots, DType::kF32, 0.5f, &tree, 1);
  reference::sum(slots, DType::kF32, 0.5f, &list, 1);
  EXPECT_EQ(tree, list);
}

}  // namespace tree_sum_test
}  // namespace phub
