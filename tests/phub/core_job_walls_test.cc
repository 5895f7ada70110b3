// Branches on a core that is not in lock-step: a copy is a wall in the branches that it is about,
// and who waits in one branch goes on with another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"
#include "tests/seeds.h"

namespace phub {
namespace core_job_walls_test {

using testing::play_core;
using Rig = testing::CoreJobRig;

constexpr uint32_t kRanks = 3, kChunks = 4, kElements = 64, kShelves = 2;

Rig::Options options(uint64_t slack) {
  return {.parameters = {.max_ranks = kRanks,
                         .rules = {.optimizer = kernels::Optimizer::kSgd,
                                   .consistency = Consistency::kSsp},
                         .slack = slack},
          .chunks = kChunks,
          .elements = kElements,
          .shelves = kShelves};
}

// Carried out from here on, with the slack of rounds from the last one's on.
void order(Rig& rig, const std::vector<BranchOrder>& orders, uint64_t slack) {
  HyperVersion version = rig.hyper.back();
  version.from_round = orders.back().round;
  version.values.slack = static_cast<double>(slack);
  rig.hyper.push_back(version);
  Boundary boundary{.round = rig.job->hold().round};
  boundary.hyper = rig.view(rig.hyper);
  boundary.orders = orders;
  rig.job->commit(boundary);
}

TEST(CoreWalls, NobodyGetsTheLastResultBeforeAllHavePushed) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@3:0>1 swap@4:0>1 | push 0 0@1=1 | sent 0:0@1
    # Rank 0 stands before the fork.
    push 0 0@2=1 | push 1 0@1=8 | sent 1:0@1 | push 1 0@2=8 | push 2 0@1=64 | sent 2:0@1 | at 1 0=0
    # The child has all updates before its round.
    push 2 0@2=64 | sent 0-2:0@2 | at 1 0=-146 | steps 0 6
    # Behind round 3 another one runs.
    push 0-2 0@3 | sent 0-2:0@3 | has 0:0=-146 1:0=-146 2:0=-146 | push 1 0@4=8 | run | has 1:0=-154
  )");
}

TEST(CoreWalls, WhoIsLostIsNotWaitedFor) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@2:0>1 | push 0 0@1=1 | push 1 0@1=8 | sent
    hold | commit 1 -2 | sent 0,1:0@1 | at 1 0=-9
  )");
}

// By the same boundary: nobody passes the wall between the two.
TEST(CoreWalls, WhoComesAsAnotherGoesIsWaitedFor) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 | order copy@3:0>1 | push 0-2 0@1=1 | run | push 0,1 0@2=8
    sends 3 | hold 2 | commit 2 -2 +2.2@2 | sent 2:0@1
    push 2 0@2=64 | sent 0-2:0@2 | at 1 0=-83
  )");
}

// Who comes while a wall is ahead of a chunk stands before it as the others do.
TEST(CoreWalls, WhoJoinsBeforeAWallGetsWhatIsBehindIt) {
  play_core(R"(
    job async sgd chunks=1 shelves=2 ranks=0,1 | order copy@2:0>1 swap@2:0>1 | push 0 0@1=1 | sent
    hold | commit 2 +2.1@2 | sent | push 1 0@1=8 | sent 0-2:0@1 | has 2:0=-9
    # The parent does not run any more.
    push 0 0@2=100 | run | at 1 0=-9
  )");
}

// Rounds 1, 4, 5 are of one branch, and 2, 3 of another: with slack 0 round 2 waits for nobody.
TEST(CoreWalls, WhoWaitsInOneBranchGoesOnWithAnother) {
  play_core(R"(
    job slack=0 sgd chunks=1 shelves=2 | shelf 0 500 | order swap@2:0>1 swap@4:0>1
    push 0 0@1=1 | sent 0:0@1 | has 0:0=500
    # Round 3 is of the branch of round 2, and round 1 is in progress.
    push 0 0@2=2 | sent | at 0 0=-1 | at 1 0=498 | steps 0 1
    push 1,2 0@1=8 | sent 1,2:0@1 | has 2:0=498 | push 1,2 0@2=16 | sent 0-2:0@2
    # Round 4 needs no more than round 1.
    push 2 0@3=32 | sent 2:0@3 | has 2:0=-17
  )");
}

TEST(CoreWalls, ABranchHasASlackOfItsOwn) {
  play_core(R"(
    job slack=3 sgd chunks=1 shelves=2 | slack 2 1 | order swap@2:0>1 | push 0-2 0@1 | sent 0-2:0@1
    # One ahead, then two.
    push 0 0@2=1 | sent 0:0@2 | push 0 0@3=1 | sent
    # There is more from round 4 on.
    slack 4 2 | slack 6 0 | order swap@6:0>1 | sent 0:0@3
  )");
}

// Which branch is where, and what became of it. Each copy makes another branch.
class Timeline {
 public:
  struct Copy {
    uint64_t round = 0;
    size_t from = 0, to = 0;
    std::array<bool, kRanks> is_lost = {};  // when it was ordered
  };

  Timeline() { std::iota(places_[1].begin(), places_[1].end(), 0); }
  void add(const BranchOrder& order, const std::array<bool, kRanks>& is_lost) {
    auto places = std::prev(places_.end())->second;
    if (order.kind == BranchOrder::kSwap) {
      std::swap(places[0], places[order.to]);
    } else {
      const size_t child = kShelves + 1 + copies_.size();
      copies_.push_back({order.round, places[order.from], child, is_lost});
      places[order.to] = child;
    }
    places_[order.round] = places;
  }
  size_t at(uint32_t place, uint64_t round) const {
    return std::prev(places_.upper_bound(round))->second[place];
  }
  const std::vector<Copy>& copies() const { return copies_; }
  const Copy* origin(size_t branch) const {
    return branch <= kShelves ? nullptr : &copies_[branch - kShelves - 1];
  }
  size_t rounds_before(size_t branch, uint64_t round) const {  // that are of the branch
    size_t count = 0;
    for (uint64_t r = 1; r < round; ++r) count += at(0, r) == branch;
    return count;
  }

 private:
  std::map<uint64_t, std::array<size_t, kShelves + 1>> places_;  // from a round on
  std::vector<Copy> copies_;
};

// One chunk by itself: every update of rank r takes 64^r, so that a parameter says how many of each
// it has.
struct Model {
  struct State {
    int64_t parameter = 0;
    uint64_t steps = 0;
  };
  std::array<uint64_t, kRanks> clocks = {};
  std::map<size_t, std::array<std::vector<uint64_t>, kRanks>> made;  // by branch, the rounds

  static int64_t weight(uint32_t rank) { return int64_t{1} << (6 * rank); }
  // As the branch was made.
  State origin(const Timeline& timeline, size_t branch) const {
    const Timeline::Copy* copy = timeline.origin(branch);
    if (copy == nullptr) return {};
    State state = origin(timeline, copy->from);
    if (!made.contains(copy->from)) return state;
    for (uint32_t r = 0; r < kRanks; ++r) {
      // Who was lost ahead of the others has made rounds behind a wall that was ordered afterwards.
      const auto is_before = [&](uint64_t round) {
        return copy->is_lost[r] || round < copy->round;
      };
      add(state, r, std::ranges::count_if(made.at(copy->from)[r], is_before));
    }
    return state;
  }
  State now(const Timeline& timeline, size_t branch) const {
    State state = origin(timeline, branch);
    if (!made.contains(branch)) return state;
    for (uint32_t r = 0; r < kRanks; ++r) {
      add(state, r, static_cast<int64_t>(made.at(branch)[r].size()));
    }
    return state;
  }

 private:
  static void add(State& state, uint32_t rank, int64_t updates) {
    state.parameter -= updates * weight(rank);
    state.steps += static_cast<uint64_t>(updates);
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
      if (is_lost_[rank]) continue;
      push(chunk, rank);
      if (random_() % 40 == 0) decide();
      if (i > 300 && !is_lost_[2] && random_() % 100 == 0) lose(2);
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

  uint64_t free_rounds = 0;  // that began farther ahead of another rank than the slack

 private:
  static constexpr uint64_t kLast = 40;

  void push(uint32_t chunk, uint32_t rank) {
    Model& model = models_[chunk];
    if (is_lost_[rank] || !has_result_[chunk][rank] || model.clocks[rank] == kLast) return;
    const uint64_t round = ++model.clocks[rank];
    model.made[timeline_.at(0, round)][rank].push_back(round);
    rig_.push(rank, chunk, round, static_cast<float>(Model::weight(rank)));
    has_result_[chunk][rank] = false;
  }

  void decide() {
    const CoreReport held = rig_.job->hold();
    const uint64_t first = std::max({held.round + 1, held.started + 2, last_});
    uint64_t round = first + random_() % 3;
    if (round > kLast) return rig_.job->commit({.round = held.round}), void();
    for (uint64_t n = 1 + random_() % 3; n > 0; --n) {
      const auto to = static_cast<uint32_t>(1 + random_() % kShelves);
      const auto from = static_cast<uint32_t>(to + 1 + random_() % kShelves) % (kShelves + 1);
      const bool copies = random_() % 3 == 0;
      orders_.push_back(
          {round, copies ? BranchOrder::kCopy : BranchOrder::kSwap, copies ? from : 0, to});
      timeline_.add(orders_.back(), is_lost_);
      last_ = round;
      if (random_() % 2 == 0 && round < kLast) ++round;
    }
    slacks_.emplace_back(last_, random_() % (slack_ + 1));
    order(rig_, orders_, slacks_.back().second);
  }

  void lose(uint32_t rank) {
    rig_.run();
    check_posts();
    is_lost_[rank] = true;
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
    const size_t branch = timeline_.at(0, clock + 1);
    const Timeline::Copy* next = check_walls(model, branch, clock);
    uint64_t slack = slack_;
    for (const auto& [from, of_branch] : slacks_) slack = from <= clock + 1 ? of_branch : slack;
    auto seen = model.origin(timeline_, branch).parameter -
                static_cast<int64_t>(rig_.result_of(rank, chunk));
    for (uint32_t r = 0; r < kRanks; ++r, seen >>= 6) {
      const auto count = static_cast<uint64_t>(seen & 63);
      EXPECT_LE(count, model.made[branch][r].size()) << "rank " << r;
      if (r == rank) {
        EXPECT_EQ(count, model.made[branch][r].size());
      }
      if (is_lost_[r]) continue;
      EXPECT_GE(count + slack, timeline_.rounds_before(branch, clock + 1)) << "rank " << r;
      if (next != nullptr) {
        EXPECT_LE(count, timeline_.rounds_before(branch, next->round)) << "rank " << r;
      }
      free_rounds += model.clocks[r] + slack < clock;
    }
    EXPECT_EQ(seen, 0);
  }

  // All have come to those that lie behind the rank. Returns the next one, if there is one.
  const Timeline::Copy* check_walls(const Model& model, size_t branch, uint64_t clock) const {
    for (const Timeline::Copy& copy : timeline_.copies()) {
      if (copy.from != branch && copy.to != branch) continue;
      if (copy.round > clock + 1) return &copy;
      for (uint32_t r = 0; r < kRanks; ++r) {
        if (!is_lost_[r]) {
          EXPECT_GE(model.clocks[r] + 1, copy.round) << "rank " << r;
        }
      }
    }
    return nullptr;
  }

  bool all_at_rest() const {
    return std::ranges::all_of(models_, [this](const Model& model) {
      for (uint32_t r = 0; r < kRanks; ++r) {
        if (!is_lost_[r] && model.clocks[r] < kLast) return false;
      }
      return true;
    });
  }

  void check_shelves() {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      for (uint32_t shelf = 1; shelf <= kShelves; ++shelf) {
        const Model::State want = models_[chunk].now(timeline_, timeline_.at(shelf, kLast + 1));
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
  Timeline timeline_;
  std::array<Model, kChunks> models_;
  std::array<bool, kRanks> is_lost_ = {};
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
  uint64_t free_rounds = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    RandomWalls run(seed);
    run.run();
    free_rounds += run.free_rounds;
    if (HasFailure()) return;
  }
  if (seeds.count < 200) return;
  EXPECT_GT(free_rounds, seeds.count);
}

}  // namespace core_job_walls_test
}  // namespace phub
