// What is kept of a job's losses, held to a plain list of all reports.
#include "phub/job/losses.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace losses_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kMost = uint64_t{1} << 40;

std::vector<uint64_t> rounds_of(const LossPage& page) {
  std::vector<uint64_t> rounds;
  for (const RoundLoss& of : page.losses) rounds.push_back(of.round);
  return rounds;
}

TEST(Losses, ARoundIsThereWhenALaterOneIsReported) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}, {4, 7}};
  losses.learn(runs);
  EXPECT_EQ(losses.page(0), LossPage());
  losses.add(0, 3, 1.5, kMost);
  EXPECT_THAT(rounds_of(losses.page(0)), IsEmpty());
  losses.add(1, 3, 2.5, kMost);
  losses.add(1, 4, 8, kMost);
  EXPECT_EQ(losses.page(0),
            (LossPage{.latest = 4, .losses = {{.round = 3, .branch = 0, .ranks = 2, .loss = 2}}}));
  losses.add(1, 5, 9, kMost);
  EXPECT_EQ(losses.page(4),
            (LossPage{.latest = 5, .losses = {{.round = 4, .branch = 7, .ranks = 1, .loss = 8}}}));
  EXPECT_THAT(rounds_of(losses.page(5)), IsEmpty());
}

TEST(Losses, ALossThatIsNotFiniteIsToldAsSuch) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}};
  losses.learn(runs);
  const double infinity = std::numeric_limits<double>::infinity();
  losses.add(0, 1, std::nan(""), kMost);
  losses.add(1, 1, 1, kMost);
  losses.add(0, 2, infinity, kMost);
  losses.add(1, 2, -infinity, kMost);
  losses.add(0, 3, 1, kMost);
  for (const RoundLoss& of : losses.page(0).losses) {
    EXPECT_TRUE(of.nonfinite);
    EXPECT_EQ(of.loss, 0);
    EXPECT_EQ(of.ranks, 2u);
  }
  EXPECT_THAT(rounds_of(losses.page(0)), ElementsAre(1, 2));
}

TEST(Losses, ARoundInWhichTheJobCannotBeIsRefused) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}};
  losses.learn(runs);
  losses.add(0, 7, 1, 10);
  for (const uint64_t round : {uint64_t{0}, uint64_t{11}, ~uint64_t{0}}) {
    testing::expect_error(ErrorCode::kInvalid, "from 1 to 10",
                          [&] { losses.add(0, round, 1, 10); });
  }
  losses.add(0, 8, 1, 10);
  EXPECT_THAT(rounds_of(losses.page(0)), ElementsAre(7));
}

// A round is told once some rank has reported a later one, by whatever name.
TEST(Losses, EachNameHasItsOwn) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}, {3, 5}};
  losses.learn(runs);
  losses.add(0, 2, 1, kMost, "train");
  losses.add(0, 2, 4, kMost, "val/top-5");
  losses.add(1, 2, 3, kMost, "train");
  losses.add(1, 2, 99, kMost, "train");  // it counts once
  EXPECT_THAT(losses.latest(), IsEmpty());
  losses.add(1, 3, 8, kMost, "train");
  const RoundLoss train{.round = 2, .ranks = 2, .loss = 2, .name = "train"};
  const RoundLoss held_out{.round = 2, .ranks = 1, .loss = 4, .name = "val/top-5"};
  EXPECT_EQ(losses.page(0), (LossPage{.latest = 3, .losses = {train, held_out}}));
  losses.add(0, 4, 6, kMost);
  const RoundLoss later{.round = 3, .branch = 5, .ranks = 1, .loss = 8, .name = "train"};
  EXPECT_THAT(losses.latest(), ElementsAre(later, held_out));
  EXPECT_THAT(losses.page(3).losses, ElementsAre(later));
}

TEST(Losses, TheLatestOfANameIsToldHoweverLongAgoItWas) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}};
  losses.learn(runs);
  const uint64_t last = 5 * kKeptLosses;
  for (uint64_t round = 1; round <= last; ++round) {
    if (round % (2 * kKeptLosses) == 7) losses.add(0, round, 4, kMost, "validation");
    losses.add(0, round, 2, kMost, "train");
  }
  const RoundLoss train{.round = last - 1, .ranks = 1, .loss = 2, .name = "train"};
  RoundLoss held_out{.round = 4 * kKeptLosses + 7, .ranks = 1, .loss = 4, .name = "validation"};
  EXPECT_THAT(losses.latest(), ElementsAre(train, held_out));
  losses.add(0, last + kKeptLosses, 2, kMost, "train");  // in the place of the last one
  EXPECT_THAT(losses.latest(), ElementsAre(::testing::Field(&RoundLoss::round, last), held_out));
  EXPECT_THAT(rounds_of(losses.page(0)), IsEmpty());
}

TEST(Losses, NamesAreBoundedInLengthAndNumber) {
  Losses losses;
  const BranchRun runs[] = {{1, 0}};
  losses.learn(runs);
  const std::string too_long(kMostLossNameBytes + 1, 'x');
  for (const std::string& name : {std::string(), std::string("two words"), std::string("\x1b[31m"),
                                  std::string("é"), std::string("a\"b"), too_long}) {
    testing::expect_error(ErrorCode::kInvalid, "cannot name a loss",
                          [&] { losses.add(0, 1, 1, kMost, name); });
  }
  EXPECT_TRUE(losses.empty());
  losses.add(0, 1, 1, kMost, std::string(kMostLossNameBytes, 'x'));
  for (size_t i = 1; i < kMostLossNames; ++i) losses.add(0, 1, 1, kMost, fmt::format("n{}", i));
  testing::expect_error(ErrorCode::kFull, "at most 8 names: 'one-more' is not one of n1, n2",
                        [&] { losses.add(0, 2, 1, kMost, "one-more"); });
  losses.add(0, 2, 1, kMost, "n1");
  EXPECT_EQ(losses.page(0).losses.size(), kMostLossNames);
  EXPECT_LT(losses.bytes(), 40'000u * kMostLossNames);
}

TEST(Losses, WhatRanIsForgottenAlsoIfNobodyReports) {
  Losses losses;
  for (uint64_t round = 1; round <= 20 * kKeptLosses; ++round) {
    const BranchRun runs[] = {{round, static_cast<uint32_t>(round % 2)}};
    losses.learn(runs);
  }
  EXPECT_LT(losses.bytes(), 4 * kKeptLosses * sizeof(BranchRun));
}

// Ranks at their own pace, with rounds left out and reports sent again; branches that are decided
// ahead, in other words replaced, and forgotten by who decides.
TEST(Losses, RandomReports) {
  const testing::Seeds seeds = testing::fresh_seeds(20);
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&random](uint64_t n) { return random() % n; };
    Losses losses;
    std::map<uint64_t, uint32_t> branches = {{1, 0}};  // from which round on
    std::map<uint64_t, std::vector<double>> reported;
    std::vector<uint64_t> at(3);
    const uint64_t stride = 1 + below(3);
    for (int step = 0; step < 12000; ++step) {
      const uint64_t lowest = *std::ranges::min_element(at);
      const auto rank = static_cast<uint32_t>(below(at.size()));
      if (at[rank] > lowest + 3) continue;
      if (below(20) == 0) {  // what is decided holds from a round that nobody is in
        const uint64_t from =
            std::max(*std::ranges::max_element(at) + 4 + below(4), branches.rbegin()->first);
        branches[from] = static_cast<uint32_t>(below(5));
      }
      std::vector<BranchRun> runs;  // who decides may be further than who reports
      const uint64_t known = lowest + 1 + below(4);
      for (auto run = std::prev(branches.upper_bound(known)); run != branches.end(); ++run) {
        runs.push_back({run->first, run->second});
      }
      losses.learn(runs);
      const bool again = below(10) == 0 && at[rank] > 0;
      if (!again) at[rank] += 1 + below(stride);
      const auto loss = static_cast<double>(below(1000));
      if (!again) reported[at[rank]].push_back(loss);
      losses.add(rank, at[rank], loss, kMost);
    }
    const uint64_t latest = reported.rbegin()->first;
    ASSERT_GT(latest, kKeptLosses) << "the ring went round";
    LossPage want{.latest = latest};
    for (const auto& [round, all] : reported) {
      if (round + kKeptLosses <= latest || round == latest) continue;
      double sum = 0;
      for (const double loss : all) sum += loss;
      want.losses.push_back({.round = round,
                             .branch = std::prev(branches.upper_bound(round))->second,
                             .ranks = static_cast<uint32_t>(all.size()),
                             .loss = sum / static_cast<double>(all.size())});
    }
    EXPECT_EQ(losses.page(0), want);
    EXPECT_LT(losses.bytes(), 100'000u);
  }
}

}  // namespace losses_test
}  // namespace phub
