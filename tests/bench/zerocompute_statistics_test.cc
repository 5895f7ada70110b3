#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "bench/zerocompute/measures.h"

namespace phub {
namespace zerocompute_statistics_test {

TEST(StatisticsTest, QuantilesInterpolateBetweenNeighbours) {
  const std::vector<double> values = {40, 10, 30, 20};
  EXPECT_DOUBLE_EQ(quantile(values, 0), 10);
  EXPECT_DOUBLE_EQ(quantile(values, 1), 40);
  EXPECT_DOUBLE_EQ(quantile(values, 0.5), 25);
  EXPECT_DOUBLE_EQ(quantile(values, 1.0 / 3), 20);
  EXPECT_DOUBLE_EQ(median(std::vector<double>{3, 1, 2}), 2);
}

TEST(StatisticsTest, OneValueIsEveryQuantile) {
  const std::vector<double> values = {7};
  for (double q : {0.0, 0.5, 0.99, 1.0}) EXPECT_DOUBLE_EQ(quantile(values, q), 7);
}

TEST(StatisticsTest, NoValueIsNoNumber) { EXPECT_TRUE(std::isnan(median({}))); }

TEST(StatisticsTest, AHiccupIsNotUsual) {
  std::vector<double> values(20, 10.0);
  values[3] = values[17] = 5000;
  EXPECT_DOUBLE_EQ(usual_mean(values), 10);
  values[5] = 46;  // a third one of twenty
  EXPECT_DOUBLE_EQ(usual_mean(values), 12);
  EXPECT_DOUBLE_EQ(usual_mean(std::vector<double>{1, 5}), 3);
  EXPECT_TRUE(std::isnan(usual_mean({})));
}

TEST(StatisticsTest, Summary) {
  std::vector<double> values(101);
  std::iota(values.rbegin(), values.rend(), 0.0);
  const Summary summary = summarize(values);
  EXPECT_DOUBLE_EQ(summary.min, 0);
  EXPECT_DOUBLE_EQ(summary.p50, 50);
  EXPECT_DOUBLE_EQ(summary.p99, 99);
  EXPECT_DOUBLE_EQ(summary.max, 100);
  EXPECT_DOUBLE_EQ(summary.total, 5050);
}

}  // namespace zerocompute_statistics_test
}  // namespace phub
