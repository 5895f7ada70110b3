#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/gradients.h"

namespace phub {
namespace zerocompute_checker_test {

using kernels::DType;

TEST(PatternTest, FillEqualsTheScalarDefinition) {
  for (uint32_t rank : {0u, 3u, 7u, 8u, 21u}) {
    for (uint64_t first : {0ull, 5ull, 8191ull, (1ull << 32) - 10}) {
      for (size_t n : {1u, 15u, 16u, 17u, 100u}) {
        std::vector<float> out(n + 1, 99);
        fill_gradients(rank, 7, first, n, DType::kF32, out.data());
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(out[i], gradient_value(rank, 7, first + i)) << rank << " " << first << " " << i;
        }
        ASSERT_EQ(out[n], 99);
      }
    }
  }
}

TEST(PatternTest, SumEqualsTheScalarDefinition) {
  for (uint32_t ranks : {1u, 2u, 7u, 8u, 9u, 16u, 19u}) {
    for (size_t n : {1u, 16u, 33u}) {
      std::vector<float> out(n + 1, 99);
      sum_of_gradients(ranks, 12, 1000, n, out.data());
      for (size_t i = 0; i < n; ++i) {
        int sum = 0;
        for (uint32_t rank = 0; rank < ranks; ++rank) sum += gradient_value(rank, 12, 1000 + i);
        ASSERT_EQ(out[i], sum) << ranks << " " << i;
      }
      ASSERT_EQ(out[n], 99);
    }
  }
}

TEST(PatternTest, HalfFormatsHoldTheSameNumbers) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> half(5000);
    fill_gradients(2, 3, 17, half.size(), dtype, half.data());
    std::vector<float> back(half.size());
    kernels::convert(half.data(), dtype, back.data(), DType::kF32, half.size());
    for (size_t i = 0; i < back.size(); ++i) {
      ASSERT_EQ(back[i], gradient_value(2, 3, 17 + i)) << i;
    }
  }
}

// All sixteen values are about as frequent, and ranks, rounds and elements are independent: two of
// them agree in one of sixteen elements.
TEST(PatternTest, ValuesDifferByRankRoundAndElement) {
  constexpr int kSamples = 160000;
  std::map<int, int> histogram;
  int same_rank = 0, same_round = 0, same_element = 0;
  for (int i = 0; i < kSamples; ++i) {
    const int value = gradient_value(3, 5, i);
    ++histogram[value];
    same_rank += value == gradient_value(4, 5, i);
    same_round += value == gradient_value(3, 6, i);
    same_element += value == gradient_value(3, 5, i + 8192);
  }
  EXPECT_EQ(histogram.size(), 16u);
  for (const auto& [value, count] : histogram) {
    EXPECT_GE(value, -8);
    EXPECT_LE(value, 7);
    EXPECT_NEAR(count, kSamples / 16, 600) << value;
  }
  for (int same : {same_rank, same_round, same_element}) EXPECT_NEAR(same, kSamples / 16, 600);
}

// A job whose results are computed as the server's formulas say, for the checker to look at.
class CheckerTest : public ::testing::TestWithParam<std::tuple<kernels::Optimizer, DType>> {
 protected:
  static constexpr uint32_t kRanks = 4;
  static constexpr uint64_t kElements = 3 * 8192 + 100;

  void SetUp() override {
    const auto [optimizer, dtype] = GetParam();
    options_ = {.ranks = kRanks,
                .elements = kElements,
                .optimizer = optimizer,
                .hyper = kernels::default_hyper(optimizer),
                .result_dtype = dtype};
    width_ = kernels::bytes_of(dtype);
    memory_.resize(Checker::reference_bytes(options_) / sizeof(float));
    params_.resize(kElements);
    state0_.resize(kElements);
    state1_.resize(kElements);
    result_.resize(kElements * width_);
  }

  Checker checker() { return {options_, std::as_writable_bytes(std::span(memory_))}; }

  // The server's round, of the ranks whose bit is set.
  void serve(uint64_t round, uint32_t ranks_mask = (1u << kRanks) - 1) {
    const auto [optimizer, dtype] = GetParam();
    std::vector<float> sum(kElements);
    for (uint64_t i = 0; i < kElements; ++i) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        if (ranks_mask >> rank & 1) sum[i] += gradient_value(rank, round, i);
      }
    }
    if (optimizer == kernels::Optimizer::kNone) {
      params_ = sum;
    } else {
      const kernels::Step step = kernels::make_step(optimizer, options_.hyper, round);
      kernels::optimize(step, sum.data(), params_.data(), state0_.data(), state1_.data(), kElements,
                        nullptr, dtype, kernels::Store::kCached);
    }
    kernels::convert(params_.data(), DType::kF32, result_.data(), dtype, kElements);
  }

  uint64_t wrong(Checker& checker, uint64_t round) {
    return checker.advance_and_check(round, 0, kElements, result_.data()).count;
  }

  std::byte* chunk(size_t index) { return result_.data() + index * 8192 * width_; }

  CheckerOptions options_;
  size_t width_ = 4;
  std::vector<float> memory_, params_, state0_, state1_;
  std::vector<std::byte> result_;
};

TEST_P(CheckerTest, RightResultsPass) {
  Checker checker = this->checker();
  for (uint64_t round = 1; round <= 5; ++round) {
    serve(round);
    ASSERT_EQ(wrong(checker, round), 0u) << round;
    ASSERT_EQ(checker.check(round, 0, kElements, result_.data()).count, 0u) << round;
  }
}

TEST_P(CheckerTest, ThePreviousResultIsCaught) {
  Checker checker = this->checker();
  serve(1);
  ASSERT_EQ(wrong(checker, 1), 0u);
  EXPECT_GT(wrong(checker, 2), kElements / 2);
}

TEST_P(CheckerTest, AMissingRankIsCaught) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    SetUp();
    std::fill(memory_.begin(), memory_.end(), 0.0f);
    std::fill(params_.begin(), params_.end(), 0.0f);
    std::fill(state0_.begin(), state0_.end(), 0.0f);
    std::fill(state1_.begin(), state1_.end(), 0.0f);
    Checker checker = this->checker();
    serve(1, 15u & ~(1u << rank));
    // In one of sixteen elements its gradient is zero; Adam's first step only shows a sum's sign.
    EXPECT_GT(wrong(checker, 1), kElements / 20) << rank;
  }
}

TEST_P(CheckerTest, SwappedChunksAreCaughtAndNamed) {
  Checker checker = this->checker();
  serve(1);
  std::swap_ranges(chunk(0), chunk(1), chunk(1));
  const Mismatch mismatch = checker.advance_and_check(1, 0, kElements, result_.data());
  EXPECT_GT(mismatch.count, 8192u / 4);
  EXPECT_LT(mismatch.element, 8192u);
}

TEST_P(CheckerTest, AStaleChunkIsCaughtByItsEdges) {
  Checker checker = this->checker();
  uint64_t found = 0;
  for (uint64_t round = 1; round <= 8; round += 2) {
    serve(round);
    const std::vector<std::byte> before = result_;
    ASSERT_EQ(wrong(checker, round), 0u);
    serve(round + 1);
    std::copy_n(before.begin() + 8192 * width_, 8192 * width_, chunk(1));
    Checker copy = checker;  // the same reference
    copy.advance_and_check(round + 1, 0, kElements, result_.data());
    uint64_t visited = 0;
    for_each_chunk_edge(0, kElements, 8192, [&](uint64_t first, size_t n) {
      visited += n;
      found += checker.check(round + 1, first, n, result_.data() + first * width_).count;
    });
    EXPECT_EQ(visited, 8u);
    ++round;
  }
  EXPECT_GT(found, 0u);
}

TEST_P(CheckerTest, OneWrongBitIsNamed) {
  serve(1);
  for (uint64_t element :
       {uint64_t{0}, uint64_t{1023}, uint64_t{1024}, uint64_t{20000}, kElements - 1}) {
    std::vector<std::byte> bad = result_;
    bad[element * width_] ^= std::byte{1};
    Checker fresh = this->checker();
    std::fill(memory_.begin(), memory_.end(), 0.0f);
    const Mismatch mismatch = fresh.advance_and_check(1, 0, kElements, bad.data());
    EXPECT_EQ(mismatch.count, 1u);
    EXPECT_EQ(mismatch.element, element);
    EXPECT_NE(std::memcmp(&mismatch.expected, &mismatch.found, 4), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CheckerTest,
    ::testing::Combine(::testing::Values(kernels::Optimizer::kNone, kernels::Optimizer::kSgd,
                                         kernels::Optimizer::kNesterov, kernels::Optimizer::kAdam),
                       ::testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
    [](const auto& info) {
      return std::string(kernels::name_of(std::get<0>(info.param))) + "_" +
             std::string(kernels::name_of(std::get<1>(info.param)));
    });

TEST(IdleCheckerTest, WithoutWorkResultsStayZero) {
  const CheckerOptions options{
      .ranks = 2, .elements = 100, .optimizer = kernels::Optimizer::kAdam, .computes = false};
  EXPECT_EQ(Checker::reference_bytes(options), 0u);
  Checker checker(options, {});
  std::vector<float> result(100);
  EXPECT_EQ(checker.advance_and_check(1, 0, 100, result.data()).count, 0u);
  result[50] = 1;
  EXPECT_EQ(checker.advance_and_check(2, 0, 100, result.data()).count, 1u);
}

TEST(ChunkEdgeTest, EveryChunkHasBoth) {
  std::vector<uint64_t> seen;
  const auto visit = [&](uint64_t first, size_t) { seen.push_back(first); };
  for_each_chunk_edge(100, 20, 8, visit);
  EXPECT_EQ(seen, (std::vector<uint64_t>{100, 107, 108, 115, 116, 119}));
  seen.clear();
  for_each_chunk_edge(5, 9, 8, visit);
  EXPECT_EQ(seen, (std::vector<uint64_t>{5, 12, 13}));
}

}  // namespace zerocompute_checker_test
}  // namespace phub
