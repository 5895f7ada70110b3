// A rank's own state is that of the branch that runs, however branches come and go.
#include "worker/by_branch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "worker/phub.h"

namespace phub {
namespace by_branch_test {

using testing::Box;
using testing::expect_error;

ByBranch::State bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
std::string text_of(std::span<const std::byte> state) {
  return {reinterpret_cast<const char*>(state.data()), state.size()};
}

// A state, in which every round leaves its number.
struct Program {
  std::string state = "begin";
  int saves = 0;
  bool fails = false;

  ByBranch by_branch() {
    return ByBranch(
        [this] {
          if (fails) throw std::runtime_error("not now");
          ++saves;
          return bytes_of(state);
        },
        [this](std::span<const std::byte> saved) {
          state = "a half";
          if (fails) throw std::runtime_error("not now");
          state = text_of(saved);
        });
  }
};

// Decisions at random, of rounds that do not descend; and each branch's state as it should be.
class Job {
 public:
  explicit Job(uint64_t seed) : random_(seed) {}

  void run() {
    ByBranch own = program_.by_branch();
    for (round_ = 1; round_ < 60; ++round_) {
      begin_round();
      program_.fails = pick(6) == 0;
      try {
        ASSERT_EQ(own.begin(all_, round_), running_) << "round " << round_;
      } catch (const std::runtime_error&) {
        program_.fails = false;
        ASSERT_EQ(own.begin(all_, round_), running_) << "round " << round_;
      }
      program_.fails = false;
      ASSERT_EQ(program_.state, states_.at(running_)) << "round " << round_;
      if (pick(4) == 0) {
        ASSERT_EQ(own.begin(all_, round_), running_);
        ASSERT_EQ(program_.state, states_.at(running_)) << "round " << round_ << ", once more";
      }
      if (pick(8) == 0) {
        const ByBranch::State saved = own.saved();
        own = program_.by_branch();
        own.restore(saved);
        ASSERT_EQ(own.saved(), saved);
      }
      program_.state += fmt::format(" {}", round_);
      states_[running_] = program_.state;
      decide();
    }
  }

 private:
  uint32_t pick(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  void begin_round() {
    for (const BranchFork& fork : all_.forks) {
      if (fork.round == round_) states_[fork.branch] = states_.at(fork.parent);
    }
    std::erase_if(all_.forks, [this](const BranchFork& fork) { return fork.round < round_; });
    while (all_.runs.size() > 1 && all_.runs[1].round <= round_) all_.runs.erase(all_.runs.begin());
    running_ = all_.runs.front().branch;
  }

  // Of the next round, or of later ones.
  void decide() {
    for (uint32_t i = pick(4); i > 0; --i) {
      latest_ = std::max(latest_, round_ + 1) + (pick(2) == 0 ? pick(4) : 0);
      std::vector<BranchStatus>& there = all_.branches;
      const uint32_t branch = there[pick(static_cast<uint32_t>(there.size()))].branch;
      switch (pick(4)) {
        case 0:
          if (there.size() > 1 && branch != all_.runs.back().branch) {
            std::erase_if(there, [=](const BranchStatus& each) { return each.branch == branch; });
          }
          break;
        case 1:
          all_.forks.push_back({latest_, next_, branch});
          there.push_back({.branch = next_++, .parent = branch, .round = latest_});
          break;
        default:
          if (all_.runs.back().round == latest_) all_.runs.pop_back();
          all_.runs.push_back({latest_, branch});
      }
    }
  }

  std::mt19937_64 random_;
  BranchReply all_ = {.branches = {{.branch = 0}}, .runs = {{1, 0}}};
  std::map<uint32_t, std::string> states_ = {{0, "begin"}};
  Program program_;
  uint64_t round_ = 1, latest_ = 2;
  uint32_t running_ = 0, next_ = 1;
};

TEST(ByBranch, EachBranchGoesOnWhereItStopped) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(1000));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    Job(seed).run();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ByBranch, ItSavesOnceForAllThatHaveTheSame) {
  Program program;
  ByBranch own = program.by_branch();
  BranchReply all = {.branches = {{.branch = 0}, {.branch = 1}, {.branch = 2}, {.branch = 3}},
                     .runs = {{1, 0}, {5, 1}},
                     .forks = {{3, 1, 0}, {3, 2, 1}, {5, 3, 0}}};
  for (uint64_t round = 1; round <= 4; ++round) own.begin(all, round);
  EXPECT_EQ(program.saves, 1);
  own.begin(all, 5);
  EXPECT_EQ(program.saves, 2) << "branch 3, and 0 that waits, have one";
  program.state = "of branch 1";
  all.branches = {{.branch = 1}};
  own.begin(all, 6);
  EXPECT_EQ(own.saved().size(), 24u) << "nothing waits any more";
  EXPECT_EQ(program.saves, 2);
}

TEST(ByBranch, ARankThatComesLaterBeginsWithWhatItHas) {
  Program program;
  ByBranch own = program.by_branch();
  const BranchReply all = {.branches = {{.branch = 0}, {.branch = 1}, {.branch = 2}},
                           .runs = {{9, 1}, {11, 0}, {12, 2}},
                           .forks = {{12, 2, 0}}};
  EXPECT_EQ(own.begin(all, 10), 1u);
  EXPECT_EQ(program.state, "begin");
  program.state = "one";
  EXPECT_EQ(program.saves, 1);
  EXPECT_EQ(own.begin(all, 11), 0u);
  EXPECT_EQ(program.state, "begin");
  program.state = "zero";
  EXPECT_EQ(own.begin(all, 12), 2u);
  EXPECT_EQ(program.state, "zero");
  expect_error(ErrorCode::kInvalid, "was begun before", [&] { own.begin(all, 10); });
  expect_error(ErrorCode::kNotFound, "forgotten", [&] { program.by_branch().begin(all, 8); });
  ByBranch late = program.by_branch();
  late.begin(all, 11);
  expect_error(ErrorCode::kInvalid, "no state of branch 3", [&] {
    late.begin({.branches = {{.branch = 0}, {.branch = 3}}, .runs = {{13, 3}}}, 13);
  });
}

TEST(ByBranch, WhatWasSavedIsChecked) {
  Program program;
  ByBranch own = program.by_branch();
  const BranchReply all = {
      .branches = {{.branch = 0}, {.branch = 1}}, .runs = {{1, 0}}, .forks = {{2, 1, 0}}};
  own.begin(all, 2);
  const ByBranch::State saved = own.saved();
  for (size_t bytes = 0; bytes < saved.size(); ++bytes) {
    expect_error(ErrorCode::kMismatch, "cut short",
                 [&] { own.restore(std::span(saved).first(bytes)); });
  }
  const auto refused = [&](size_t at, uint32_t word) {
    ByBranch::State changed = saved;
    std::memcpy(changed.data() + at, &word, sizeof word);
    expect_error(ErrorCode::kMismatch, "cut short", [&] { own.restore(changed); });
  };
  refused(12, 1u << 30);  // branches
  refused(16, 1u << 30);  // states
  refused(24, 0);         // the branch is the one whose state is in place
  refused(28, 1);         // its state
  refused(32, 1u << 31);  // bytes
  ByBranch::State more = saved;
  more.push_back({});
  expect_error(ErrorCode::kMismatch, "cut short", [&] { own.restore(more); });
  own.restore(saved);
  EXPECT_EQ(own.saved(), saved);
}

phub_code save_in_c(void* user_data, const void** bytes, size_t* size) {
  const auto& state = *static_cast<std::string*>(user_data);
  if (state == "fails") return PHUB_TAKEN;
  *bytes = state.data();
  *size = state.size();
  return PHUB_OK;
}
phub_code load_in_c(void* user_data, const void* bytes, size_t size) {
  static_cast<std::string*>(user_data)->assign(static_cast<const char*>(bytes), size);
  return PHUB_OK;
}

// A job of one rank, and the same through C.
TEST(ByBranch, AJobsBranchesHaveIt) {
  Box box;
  JobSpec spec;
  spec.name = "own";
  spec.keys = {{.name = "key", .elements = 8}};
  spec.optimizer = "sgd";
  spec.initial = "zeros";
  spec.branches = 1;
  const std::string address = box.options(spec).server;
  phub_options* options = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  ASSERT_EQ(phub_options_set(options, "server", address.c_str()), PHUB_OK);
  ASSERT_EQ(phub_options_set(options, "job", "own"), PHUB_OK);
  ASSERT_EQ(phub_options_set(options, "optimizer", "sgd"), PHUB_OK);
  ASSERT_EQ(phub_options_set_number(options, "branches", 1), PHUB_OK);
  ASSERT_EQ(phub_options_add_key(options, "key", 8), PHUB_OK);
  phub_worker* worker = nullptr;
  ASSERT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
  ASSERT_EQ(phub_options_destroy(options), PHUB_OK);
  std::string state = "fails";
  phub_by_branch* own = nullptr;
  EXPECT_EQ(phub_by_branch_create(nullptr, load_in_c, &state, &own), PHUB_INVALID);
  EXPECT_EQ(phub_by_branch_create(save_in_c, nullptr, &state, &own), PHUB_INVALID);
  EXPECT_EQ(phub_by_branch_create(save_in_c, load_in_c, &state, nullptr), PHUB_INVALID);
  ASSERT_EQ(phub_by_branch_create(save_in_c, load_in_c, &state, &own), PHUB_OK);
  uint64_t round = 3;
  uint32_t child = 0;
  ASSERT_EQ(phub_fork(worker, 0, nullptr, nullptr, 0, &round, &child), PHUB_OK);
  ASSERT_EQ(round, 3u);
  const uint32_t turns[] = {child, 0};
  const uint64_t rounds[] = {2, 0};
  ASSERT_EQ(phub_schedule(worker, turns, rounds, 2, &round), PHUB_OK);
  ASSERT_EQ(phub_discard(worker, child, nullptr), PHUB_OK);
  std::vector<std::pair<uint32_t, std::string>> seen;
  for (int i = 1; i <= 6; ++i) {
    uint32_t branch = 9;
    if (i == 3) {
      EXPECT_EQ(phub_by_branch_begin(own, worker, 0, &branch), PHUB_INVALID);
      EXPECT_NE(std::string(phub_last_error()).find("save of the state failed"), std::string::npos);
      state = "root";
    }
    ASSERT_EQ(phub_by_branch_begin(own, worker, 0, &branch), PHUB_OK) << phub_last_error();
    seen.emplace_back(branch, state);
    if (i == 3) state = "child";
    if (i == 4) {
      const void* bytes = nullptr;
      size_t size = 0;
      ASSERT_EQ(phub_by_branch_saved(own, &bytes, &size), PHUB_OK);
      phub_by_branch* again = nullptr;
      ASSERT_EQ(phub_by_branch_create(save_in_c, load_in_c, &state, &again), PHUB_OK);
      EXPECT_EQ(phub_by_branch_restore(again, bytes, size - 1), PHUB_MISMATCH);
      ASSERT_EQ(phub_by_branch_restore(again, bytes, size), PHUB_OK);
      ASSERT_EQ(phub_by_branch_destroy(std::exchange(own, again)), PHUB_OK);
    }
    ASSERT_EQ(phub_push(worker, 0, 0), PHUB_OK);
    ASSERT_EQ(phub_wait_all(worker), PHUB_OK);
  }
  EXPECT_EQ(seen,
            (std::vector<std::pair<uint32_t, std::string>>{
                {0, "fails"}, {0, "fails"}, {1, "root"}, {1, "child"}, {0, "root"}, {0, "root"}}));
  EXPECT_EQ(phub_by_branch_begin(nullptr, worker, 0, nullptr), PHUB_BAD_HANDLE);
  EXPECT_EQ(phub_by_branch_destroy(own), PHUB_OK);
  EXPECT_EQ(phub_by_branch_destroy(own), PHUB_BAD_HANDLE);
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
}

}  // namespace by_branch_test
}  // namespace phub
