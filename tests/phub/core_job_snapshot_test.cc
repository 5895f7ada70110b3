// Snapshots, and what is copied or set of some keys, between two rounds. (In any order of what
// comes: rack_sim.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/phub/core_job_rig.h"
#include "tests/phub/core_script.h"

namespace phub {
namespace core_job_snapshot_test {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::play_core;
using ::testing::UnorderedElementsAre;
using Rig = testing::CoreJobRig;

const std::vector<uint32_t> kRanks = {0, 1, 2};
constexpr uint32_t kChunks = 9;

Rig::Options options() {
  return {.parameters = {.max_ranks = 3, .rules = {.optimizer = kernels::Optimizer::kMomentum}},
          .chunks = kChunks,
          .snapshots = true};
}

std::vector<float> parameters_of(const Rig& rig) {
  const auto* floats = reinterpret_cast<const float*>(rig.results.data());
  return {floats, floats + rig.results.size() / sizeof(float)};
}

TEST(CoreJobSnapshot, IsTakenWhileTheCoreIsIdle) {
  play_core(R"(
    # A chunk at a time: what arrives does not wait. It is reported once.
    job momentum chunks=9 snapshots | hold 1 | commit 1 snapshot | busy | step | reported
    run | busy | reported snapped @1 | sleeps | reported | copied 0-8=0/0/0
  )");
}

TEST(CoreJobSnapshot, WaitsForChunksThatAreBehind) {
  play_core(R"(
    # Nothing can be done about chunk 0.
    job momentum chunks=9 snapshots | push 0-2 1-8@1 | run | hold 2 | commit 2 snapshot | told | sleeps
    push 0-2 0@1 | told snapped @2 | copied 0-8=-21/21/1
  )");
}

// Chunks are copied when they come to it, not before.
TEST(CoreJobSnapshot, MayBeOfALaterRound) {
  play_core(R"(
    job half-momentum chunks=9 snapshots | hold 1 | commit 1 snapshot@4 | pushes 1 | told | pushes 2
    told | pushes 3 | pushes 4 | pushes 5 | told snapped @4 | copied 0-8=-89.25/36.75/3
  )");
}

// All leave in the boundary that asks for a later round: that is not what there is now.
TEST(CoreJobSnapshot, OfARoundThatNobodyCompletesIsNone) {
  play_core(R"(
    job momentum chunks=9 snapshots | pushes 1 | hold 2 | commit 2 -0 -1 -2 snapshot@51 | told
    hold 2 | commit 2 snapshot@2 at-end | told snapped @2 | copied 0-8=-21/21/1
  )");
}

TEST(CoreJobSnapshot, OfAJobThatHasNothingToSaveIsComplete) {
  play_core("job momentum chunks=9 | hold 1 | commit 1 snapshot | told snapped @1");
}

// Memory for the state of all chunks but the last, in an order of its own.
struct StateMemory {
  explicit StateMemory(float parameter, float state) : floats(2 * kChunks * kElements) {
    memory.floats = floats.data();
    memory.places.resize(kChunks);
    for (uint32_t id = 0; id + 1 < kChunks; ++id) {
      memory.places[id] = {.first = 2 * kElements * id, .stride = kElements, .steps = 40};
      std::fill_n(floats.begin() + 2 * kElements * id, kElements, parameter);
      std::fill_n(floats.begin() + 2 * kElements * id + kElements, kElements, state);
    }
  }
  static constexpr uint32_t kElements = 64;
  std::vector<float> floats;
  KeyStateMemory memory;
};

// Until the round is closed nobody's parameters change. A snapshot of it is of before what is set,
// a get of after that.
TEST(CoreJobKeyStates, AreSetWhenTheirRoundIsClosed) {
  play_core(R"(
    job half-momentum chunks=9 snapshots | push 0-2 0-8@1 | run | push 0-2 0-3@2 | run
    hold 3 | commit 3 snapshot set:1-8=5/2/40 | hold 3 | commit 3 get
    # Some chunks are in round 2, whose state is not got yet.
    told | got 1-3=5/2/40 | got 4-8=0/0/0 | push 0-2 4-8@2 | run | busy
    reported snapped @3, got @3 | sleeps | copied 0-8=-52.5/31.5/2 | is 0-8=-52.5/31.5/0
    got 1-8=5/2/40 | got 0=-52.5/31.5/2
    push 0-2 0-8@3 | run | busy | reported set @3 | is 1-8=-17/22/0 | is 0=-89.25/36.75/0
  )");
}

// What comes before the core is idle is closed after the copy.
TEST(CoreJobKeyStates, AreCopiedBeforeTheirRoundIsClosed) {
  play_core(R"(
    job half-momentum chunks=9 snapshots | pushes 1 | pushes 2 | hold 3 | commit 3 get
    push 0-2 0-8@3 | told got @3 | got 0-8=-52.5/31.5/2
  )");
}

// What is set in a round, and a snapshot of that round or of a later one, where all who were in the
// round are gone and one comes who begins behind it.
struct Skips {
  bool lazy = false;     // the key's steps are those of its rows that are sent
  bool at_once = false;  // one boundary sets, and takes all out
  bool behind = false;   // half of the chunks are in the round before
  uint64_t to = 1;       // rounds from that of the set to the newcomer's first
  uint64_t saved = 0;    // and to the snapshot's
};

class SkippedRounds {
 public:
  explicit SkippedRounds(const Skips& skips) : skips_(skips), rig_(options_of(skips)) {}

  void run() {
    push_round(kRanks, 1, 0);
    push_round(kRanks, 2, skips_.behind ? kChunks / 2 : 0);
    const State before = after({}, kRanks, {1, 2}), behind = after({}, kRanks, {1});
    const StateMemory from(5, 2);
    ASSERT_EQ(rig_.job->hold().round, kSet);
    Boundary set{.round = kSet, .set_state = &from.memory};
    if (!skips_.at_once) {
      rig_.job->commit(set);
      rig_.run();
      set = {.round = rig_.job->hold().round};
      ASSERT_EQ(set.round, kSet);
    }
    take_all_out(set);
    rig_.job->commit(set);
    rig_.run();
    check_newcomer();
    const std::vector<uint32_t> newcomer = {0};
    for (uint64_t round = first_; round < first_ + 2; ++round) push_round(newcomer, round, 0);
    EXPECT_THAT(rig_.take_reports(),
                UnorderedElementsAre("set @3", fmt::format("snapped @{}", kSet + skips_.saved)));
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      chunk_ = chunk;
      const bool lags = skips_.behind && chunk < kChunks / 2;
      check(lags ? behind : before, newcomer);
    }
    push_nothing();
  }

 private:
  static constexpr uint64_t kSet = 3;
  struct State {
    float parameter = 0, momentum = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  static Rig::Options options_of(const Skips& skips) {
    Rig::Options with = options();
    with.lazy = skips.lazy;
    if (skips.lazy) with.form = kernels::SlotForm::kRows;
    if (skips.lazy) with.columns = kColumns, with.limit = 1;
    return with;
  }

  void push_round(const std::vector<uint32_t>& ranks, uint64_t round, uint32_t from) {
    for (uint32_t chunk = from; chunk < kChunks; ++chunk) {
      for (const uint32_t rank : ranks) push(rank, chunk, round);
    }
    rig_.run();
    rig_.take_posts();
  }
  void push(uint32_t rank, uint32_t chunk, uint64_t round) {
    const float value = static_cast<float>(1 + rank + round);
    if (!skips_.lazy) return rig_.push(rank, chunk, round, value);
    const kernels::SlotShape shape{StateMemory::kElements, kernels::DType::kF32,
                                   kernels::SlotForm::kRows, kColumns, 1};
    const std::vector<float> row(kColumns, value);
    std::byte* const slot =
        rig_.slots[rank].data() + size_t{chunk} * StateMemory::kElements * sizeof(float);
    kernels::clear_rows(slot);
    kernels::append_row(shape, 0, row.data(), slot);
    rig_.arrive(rank, {chunk, static_cast<uint32_t>(round), ImmKind::kData});
  }
  static State after(State state, const std::vector<uint32_t>& ranks,
                     const std::vector<uint64_t>& rounds) {
    for (const uint64_t round : rounds) {
      float sum = 0;
      for (const uint32_t rank : ranks) sum += static_cast<float>(1 + rank + round);
      state.momentum = 0.9f * state.momentum + sum;
      state.parameter -= state.momentum;
    }
    return state;
  }

  void take_all_out(Boundary& boundary) {
    for (const uint32_t rank : kRanks) {
      boundary.lost.push_back({.rank = rank, .last_rounds = last_rounds_});
    }
    boundary.admitted.push_back(rig_.admission(0, 2, first_));
    boundary.snapshot = true;
    boundary.snapshot_round = kSet + skips_.saved;
  }
  // It gets what was set, whole, and of every chunk once.
  void check_newcomer() {
    std::vector<uint32_t> posts(kChunks);
    for (const auto& [rank, write] : std::exchange(rig_.endpoint.posted, {})) {
      EXPECT_EQ(rank, 0u);
      const Imm imm = decode(write.imm);
      EXPECT_EQ(imm.kind, ImmKind::kData);
      EXPECT_EQ(imm.round, first_ - 1);
      ++posts.at(imm.chunk);
    }
    EXPECT_THAT(posts, Each(1u));
    for (uint32_t chunk = 1; chunk < kChunks; ++chunk) EXPECT_EQ(rig_.result(chunk), 5) << chunk;
  }
  // Of chunk 0 nothing is set.
  void check(const State& before, const std::vector<uint32_t>& newcomer) {
    const State set = chunk_ == 0 ? before : State{5, 2};
    const uint64_t saved = kSet + skips_.saved;
    std::vector<uint64_t> rounds;
    for (uint64_t round = first_; round < saved; ++round) rounds.push_back(round);
    const State copied = skips_.saved == 0 ? before : after(set, newcomer, rounds);
    EXPECT_EQ((State{rig_.copy_parameters[at()], rig_.copy_state[at()]}), copied) << chunk_;
    const bool is_set = chunk_ != 0 && skips_.saved > 0;
    EXPECT_EQ(rig_.copy_steps[kChunks - 1 - chunk_], is_set ? 40 + skips_.saved : saved - 1)
        << "rounds that are skipped count";
    const State now = after(set, newcomer, {first_, first_ + 1});
    EXPECT_EQ((State{rig_.result(chunk_), rig_.state[at()]}), now) << chunk_;
    if (!skips_.lazy) return;
    const size_t other_row = at() + StateMemory::kElements - 1;
    EXPECT_EQ(parameters_of(rig_)[other_row], chunk_ == 0 ? 0 : 5) << chunk_;
    EXPECT_EQ(rig_.copy_parameters[other_row], is_set ? 5 : 0) << chunk_;
  }
  size_t at() const { return size_t{chunk_} * StateMemory::kElements; }
  // The last result goes to nobody again, if nothing has changed.
  void push_nothing() {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      rig_.arrive(0, {chunk, static_cast<uint32_t>(first_ + 2), ImmKind::kNull});
    }
    rig_.run();
    ASSERT_EQ(rig_.endpoint.posted.size(), kChunks);
    for (const auto& [rank, write] : rig_.endpoint.posted) {
      EXPECT_EQ(decode(write.imm).kind == ImmKind::kNull, skips_.lazy);
    }
  }

  static constexpr uint32_t kColumns = 16;
  const Skips skips_;
  const uint64_t first_ = kSet + skips_.to;
  Rig rig_;
  std::vector<uint64_t> last_rounds_ = std::vector<uint64_t>(kChunks);
  uint32_t chunk_ = 0;
};

TEST(CoreJobKeyStates, AreSetInRoundsThatAreSkippedWhicheverIsSaved) {
  for (uint32_t bits = 0; bits < 8; ++bits) {
    for (uint64_t to = 1; to <= 3; ++to) {
      for (uint64_t saved = 0; saved <= to + 1; ++saved) {
        SCOPED_TRACE(fmt::format("{} {} {}", bits, to, saved));
        const Skips skips{.lazy = (bits & 1) != 0,
                          .at_once = (bits & 2) != 0,
                          .behind = (bits & 4) != 0,
                          .to = to,
                          .saved = saved};
        SkippedRounds(skips).run();
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace core_job_snapshot_test
}  // namespace phub
