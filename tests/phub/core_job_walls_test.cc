// Branches on a core that is not in lock-step: what is ordered before a round is a wall.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/seeds.h"

namespace phub {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Rig = testing::CoreJobRig;

constexpr uint32_t kRanks = 3, kChunks = 4, kElements = 64, kShelves = 2;

Rig::Options options(uint64_t slack, uint32_t chunks = kChunks) {
  return {.parameters = {.max_ranks = kRanks,
                         .optimizer = kernels::Optimizer::kSgd,
                         .lock_step = false,
                         .slack = slack},
          .chunks = chunks,
          .elements = kElements,
          .shelves = kShelves};
}

// Carried out from here on; the slack is that of rounds from `round` on, if it is not kNever.
void order(Rig& rig, const std::vector<BranchOrder>& orders, uint64_t slack = kNever) {
  if (slack != kNever) {
    HyperVersion version = rig.hyper.back();
    version.from_round = orders.back().round;
    version.values.slack = static_cast<double>(slack);
    rig.hyper.push_back(version);
  }
  Boundary boundary{.round = rig.job->hold().round};
  boundary.hyper = rig.view(rig.hyper);
  boundary.orders = orders;
  rig.job->commit(boundary);
}

std::vector<std::string> posts_after(Rig& rig) {
  rig.run();
  return rig.take_posts();
}

TEST(CoreWalls, NobodyGetsTheLastResultBeforeAllHavePushed) {
  Rig rig(options(kNever, 1));
  const std::vector<BranchOrder> orders = {{3, BranchOrder::kCopy, 0, 1},
                                           {4, BranchOrder::kSwap, 0, 1}};
  order(rig, orders);
  rig.push(0, 0, 1, 1);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@1"));
  rig.push(0, 0, 2, 1);
  rig.push(1, 0, 1, 8);
  EXPECT_THAT(posts_after(rig), ElementsAre("1:0@1")) << "rank 0 stands before the fork";
  rig.push(1, 0, 2, 8);
  rig.push(2, 0, 1, 64);
  EXPECT_THAT(posts_after(rig), ElementsAre("2:0@1"));
  EXPECT_EQ(rig.at(1, Places::kParameters, 0), 0);
  rig.push(2, 0, 2, 64);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@2", "1:0@2", "2:0@2"));
  EXPECT_EQ(rig.at(1, Places::kParameters, 0), -2 * 73)
      << "the child has all updates before its round";
  EXPECT_EQ(rig.shelves.steps[0][0], 6u);
  rig.push_all(std::vector<uint32_t>{0, 1, 2}, 0, 3);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@3", "1:0@3", "2:0@3"));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(rig.result_of(rank, 0), -2 * 73) << "another runs: rank " << rank;
  }
  rig.push(1, 0, 4, 8);
  rig.run();
  EXPECT_EQ(rig.result_of(1, 0), -2 * 73 - 8);
}

TEST(CoreWalls, WhoIsLostIsNotWaitedFor) {
  Rig rig(options(kNever, 1));
  const std::vector<BranchOrder> orders = {{2, BranchOrder::kCopy, 0, 1}};
  order(rig, orders);
  rig.push(0, 0, 1, 1);
  rig.push(1, 0, 1, 8);
  EXPECT_THAT(posts_after(rig), IsEmpty());
  const uint64_t round = rig.job->hold().round;
  rig.job->commit({.round = round, .lost = {{.rank = 2, .expected_again = kNever}}});
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@1", "1:0@1"));
  EXPECT_EQ(rig.at(1, Places::kParameters, 0), -9);
}

// By the same boundary: nobody passes the wall between the two.
TEST(CoreWalls, WhoComesAsAnotherGoesIsWaitedFor) {
  Rig rig(options(kNever, 1));
  const std::vector<BranchOrder> orders = {{3, BranchOrder::kCopy, 0, 1}};
  order(rig, orders);
  for (uint32_t rank = 0; rank < kRanks; ++rank) rig.push(rank, 0, 1, 1);
  rig.run();
  rig.push(0, 0, 2, 8);
  rig.push(1, 0, 2, 8);
  rig.run();
  rig.take_posts();
  const uint64_t round = rig.job->hold().round;
  rig.job->commit({.round = round,
                   .lost = {{.rank = 2, .expected_again = kNever}},
                   .admitted = {rig.admission(2, 2, 2)}});
  EXPECT_THAT(posts_after(rig), ElementsAre("2:0@1")) << "what round 2 begins with";
  rig.push(2, 0, 2, 64);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@2", "1:0@2", "2:0@2"));
  EXPECT_EQ(rig.at(1, Places::kParameters, 0), -3 - 2 * 8 - 64);
}

// Who comes while a wall is ahead of a chunk stands before it as the others do.
TEST(CoreWalls, WhoJoinsBeforeAWallGetsWhatIsBehindIt) {
  Rig::Options with = options(kNever, 1);
  with.expected = {0, 1};
  Rig rig(with);
  const std::vector<BranchOrder> orders = {{2, BranchOrder::kCopy, 0, 1},
                                           {2, BranchOrder::kSwap, 0, 2}};
  rig.shelves.arrays[2].assign(kElements, 500);
  order(rig, orders);
  rig.push(0, 0, 1, 1);
  EXPECT_THAT(posts_after(rig), IsEmpty());
  rig.job->hold();
  rig.job->commit({.round = 2, .admitted = {rig.admission(2, 1, 2)}});
  EXPECT_THAT(posts_after(rig), IsEmpty());
  rig.push(1, 0, 1, 8);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  EXPECT_EQ(rig.result_of(2, 0), 500);
  EXPECT_EQ(rig.at(1, Places::kParameters, 0), -9);
}

TEST(CoreWalls, ABranchHasASlackOfItsOwn) {
  Rig rig(options(3, 1));
  const std::vector<BranchOrder> orders = {{2, BranchOrder::kSwap, 0, 1}};
  order(rig, orders, 1);
  rig.push_all(std::vector<uint32_t>{0, 1, 2}, 0, 1);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@1", "1:0@1", "2:0@1"));
  rig.push(0, 0, 2, 1);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@2")) << "one ahead";
  rig.push(0, 0, 3, 1);
  EXPECT_THAT(posts_after(rig), IsEmpty()) << "two ahead";
  const std::vector<BranchOrder> more = {{6, BranchOrder::kSwap, 0, 1}};
  rig.hyper.push_back(rig.hyper.back());
  rig.hyper.back().from_round = 4;
  rig.hyper.back().values.slack = 2;
  order(rig, more, 0);
  EXPECT_THAT(posts_after(rig), ElementsAre("0:0@3")) << "there is more from round 4 on";
}

// One chunk by itself: every update of rank r takes 64^r, so that a parameter says how many of each
// it has.
struct Model {
  struct State {
    int64_t parameter = 0;
    uint64_t steps = 0;
  };
  std::array<uint64_t, kRanks> clocks = {};
  std::array<uint64_t, kRanks> counted = {};  // of the clocks, what is in places[0]
  std::array<State, kShelves + 1> places;
  uint64_t wall = 1;  // the last one that was passed

  static int64_t weight(uint32_t rank) { return int64_t{1} << (6 * rank); }
  // `until`: by rank, the last round that comes before it.
  void pass(const BranchOrder& order, const std::array<uint64_t, kRanks>& until) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      places[0].parameter -= static_cast<int64_t>(until[r] - counted[r]) * weight(r);
      places[0].steps += until[r] - counted[r];
      counted[r] = until[r];
    }
    wall = order.round;
    if (order.kind == BranchOrder::kCopy) {
      places[order.to] = places[order.from];
    } else {
      std::swap(places[0], places[order.to]);
    }
  }
};

class RandomWalls {
 public:
  explicit RandomWalls(uint64_t seed) : random_(seed), rig_(options(slack_)) {
    slacks_.emplace_back(1, slack_);
  }

  void run() {
    for (int i = 0; i < 600; ++i) {
      const auto chunk = static_cast<uint32_t>(random_() % kChunks);
      const auto rank = static_cast<uint32_t>(random_() % kRanks);
      if (is_lost(rank)) continue;
      push(chunk, rank);
      if (random_() % 40 == 0) decide();
      if (i > 300 && !is_lost(2) && random_() % 100 == 0) lose(2);
      for (uint64_t steps = random_() % 3; steps > 0; --steps) rig_.job->step();
      check_posts();
    }
    while (!all_at_rest()) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        for (uint32_t rank = 0; rank < kRanks; ++rank) push(chunk, rank);
      }
      rig_.run();
      check_posts();
    }
    check_shelves();
  }

 private:
  static constexpr uint64_t kLast = 40;

  bool is_lost(uint32_t rank) const { return orders_before_loss_[rank] != kNever; }
  // Who was lost ahead of the others has made rounds behind walls that were ordered afterwards.
  bool stops_at(uint32_t rank, size_t order) const { return order < orders_before_loss_[rank]; }
  std::array<uint64_t, kRanks> rounds_before(size_t order, const Model& model) const {
    std::array<uint64_t, kRanks> rounds = model.clocks;
    for (uint32_t r = 0; r < kRanks; ++r) {
      if (stops_at(r, order)) rounds[r] = std::min(rounds[r], orders_[order].round - 1);
    }
    return rounds;
  }

  void push(uint32_t chunk, uint32_t rank) {
    uint64_t& clock = models_[chunk].clocks[rank];
    if (is_lost(rank) || !has_result_[chunk][rank] || clock == kLast) return;
    rig_.push(rank, chunk, ++clock, static_cast<float>(Model::weight(rank)));
    has_result_[chunk][rank] = false;
  }

  void decide() {
    const CoreReport held = rig_.job->hold();
    const uint64_t first = std::max({held.round + 1, held.started + 2, last_});
    uint64_t round = first + random_() % 3;
    if (round > kLast) return rig_.job->commit({.round = held.round}), void();
    for (uint64_t n = 1 + random_() % 3; n > 0; --n) {
      const auto to = static_cast<uint32_t>(1 + random_() % kShelves);
      const auto kind = random_() % 2 == 0 ? BranchOrder::kCopy : BranchOrder::kSwap;
      orders_.push_back({round, kind, 0, to});
    }
    last_ = round;
    slacks_.emplace_back(round, random_() % (slack_ + 1));
    order(rig_, orders_, slacks_.back().second);
  }

  void lose(uint32_t rank) {
    rig_.run();
    check_posts();
    orders_before_loss_[rank] = orders_.size();
    const uint64_t round = rig_.job->hold().round;
    rig_.job->commit({.round = round, .lost = {{.rank = rank, .expected_again = kNever}}});
  }

  void check_posts() {
    for (const std::string& post : rig_.take_posts()) {
      const auto rank = static_cast<uint32_t>(post[0] - '0');
      const auto chunk = static_cast<uint32_t>(post[2] - '0');
      SCOPED_TRACE(post);
      ASSERT_FALSE(has_result_[chunk][rank]);
      has_result_[chunk][rank] = true;
      check(chunk, rank);
    }
  }

  // What it sees is of the branch with which its next round begins.
  void check(uint32_t chunk, uint32_t rank) {
    Model& model = models_[chunk];
    const uint64_t clock = model.clocks[rank];
    for (const BranchOrder& each : orders_) {
      if (each.round > model.wall && each.round <= clock + 1) wait_for_all(model, each.round);
    }
    size_t at = passed_[chunk];
    for (; at < orders_.size() && orders_[at].round <= clock + 1; ++at) {
      model.pass(orders_[at], rounds_before(at, model));
    }
    passed_[chunk] = at;
    auto seen = model.places[0].parameter - static_cast<int64_t>(rig_.result_of(rank, chunk));
    uint64_t slack = slack_;
    for (const auto& [from, of_branch] : slacks_) slack = from <= clock + 1 ? of_branch : slack;
    for (uint32_t r = 0; r < kRanks; ++r, seen >>= 6) {
      const uint64_t count = model.counted[r] + static_cast<uint64_t>(seen & 63);
      EXPECT_LE(count, model.clocks[r]) << "rank " << r;
      if (r == rank) {
        EXPECT_EQ(count, clock);
      }
      if (!is_lost(r)) {
        EXPECT_GE(count + slack, clock) << "rank " << r;
      }
      if (at < orders_.size() && stops_at(r, at)) {
        EXPECT_LT(count, orders_[at].round) << "rank " << r;
      }
    }
    EXPECT_EQ(seen, 0);
  }

  void wait_for_all(const Model& model, uint64_t wall) const {
    for (uint32_t r = 0; r < kRanks; ++r) {
      if (!is_lost(r)) {
        EXPECT_GE(model.clocks[r] + 1, wall) << "rank " << r;
      }
    }
  }

  bool all_at_rest() const {
    return std::ranges::all_of(models_, [this](const Model& model) {
      for (uint32_t r = 0; r < kRanks; ++r) {
        if (!is_lost(r) && model.clocks[r] < kLast) return false;
      }
      return true;
    });
  }

  void check_shelves() {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      for (uint32_t shelf = 1; shelf <= kShelves; ++shelf) {
        const Model::State& want = models_[chunk].places[shelf];
        EXPECT_EQ(rig_.at(shelf, Places::kParameters, chunk), static_cast<float>(want.parameter));
        EXPECT_EQ(rig_.shelves.steps[shelf - 1][kChunks - 1 - chunk], want.steps);
      }
    }
  }

  std::mt19937_64 random_;
  const uint64_t slack_ = random_() % 4;
  Rig rig_;
  std::vector<BranchOrder> orders_;
  std::vector<std::pair<uint64_t, uint64_t>> slacks_;  // from a round on
  uint64_t last_ = 1;
  std::array<Model, kChunks> models_;
  std::array<size_t, kChunks> passed_ = {};
  std::array<uint64_t, kRanks> orders_before_loss_ = [] {  // kNever: it is not lost
    std::array<uint64_t, kRanks> all;
    all.fill(kNever);
    return all;
  }();
  std::array<std::array<bool, kRanks>, kChunks> has_result_ = [] {
    std::array<std::array<bool, kRanks>, kChunks> all;
    for (auto& of_chunk : all) of_chunk.fill(true);
    return all;
  }();
};

// In any order of arrivals, decisions and losses every chunk passes a wall with all updates of the
// rounds before it and no other, and every rank sees the same branch behind it.
TEST(CoreWalls, EveryChunkPassesThemWithTheSameUpdates) {
  const testing::Seeds seeds = testing::fresh_seeds(200);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    RandomWalls(seed).run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace phub
