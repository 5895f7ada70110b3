// Rows by branch against an array for each branch, in random histories.
#include "worker/geeps/branch_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"

namespace phub::geeps {
namespace branch_rows_test {

using phub::testing::error_of;
using phub::testing::expect_error;
using phub::testing::fresh_seeds;
using phub::testing::scaled;

constexpr uint32_t kRows = 23, kFloats = 3;
constexpr uint64_t kRowBytes = kFloats * sizeof(float) + 24, kIndexBytes = kRows * sizeof(uint32_t);

std::vector<float> zeros() { return std::vector<float>(size_t{kRows} * kFloats); }

class History {
 public:
  explicit History(uint64_t seed) : random_(seed) {}

  void run() {
    for (int i = 0; i < 200; ++i) {
      switch (pick(7)) {
        case 0:
          fork();
          break;
        case 1:
          change();
          break;
        case 2:
          discard();
          break;
        case 3:
          if (pick(5) == 0) save_and_restore();
          break;
        default:
          write();
      }
      ASSERT_EQ(home_, arrays_.at(running_)) << "step " << i;
    }
    for (const auto& [branch, array] : arrays_) {
      if (branch == running_) continue;
      rows_->enter(branch, running_);
      running_ = branch;
      ASSERT_EQ(home_, array) << "branch " << branch;
    }
    rows_->retain({running_});
    EXPECT_EQ(rows_->bytes(), 0u);
  }

 private:
  uint32_t pick(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  uint32_t any_branch() {
    return std::next(arrays_.begin(), pick(static_cast<uint32_t>(arrays_.size())))->first;
  }
  void fork() {
    if (arrays_.size() > 6) return;
    const uint32_t parent = any_branch(), child = next_++;
    arrays_[child] = arrays_.at(parent);
    parent == running_ ? rows_->fork_running(child) : rows_->fork(parent, child);
  }
  void change() {
    const uint32_t to = any_branch();
    if (to != running_) rows_->enter(to, running_);
    running_ = to;
  }
  void discard() {
    const uint32_t branch = any_branch();
    if (branch == running_) return;
    arrays_.erase(branch);
    std::set<uint32_t> left;
    for (const auto& [each, array] : arrays_) left.insert(each);
    rows_->retain(left);
  }
  void write() {
    const uint32_t first = pick(kRows), count = 1 + pick(kRows - first);
    const std::vector<phub::geeps::Run> runs = {{pick(5), first, count}};
    rows_->keep(runs);
    for (size_t i = first * kFloats; i < size_t{first + count} * kFloats; ++i) {
      home_[i] = arrays_.at(running_)[i] = static_cast<float>(random_() % 1'000'000);
    }
  }
  void save_and_restore() {
    const uint64_t bytes = rows_->bytes();
    const std::vector<std::byte> saved = rows_->saved();
    rows_.emplace(home_, kFloats);
    rows_->restore(saved, "t");
    EXPECT_EQ(rows_->bytes(), bytes);
  }

  std::mt19937_64 random_;
  std::vector<float> home_ = zeros();
  std::optional<BranchRows> rows_{std::in_place, home_, kFloats};
  std::map<uint32_t, std::vector<float>> arrays_ = {{0, zeros()}};
  uint32_t running_ = 0, next_ = 1;
};

TEST(BranchRows, AreAsAnArrayForEachBranch) {
  const auto seeds = fresh_seeds(scaled(200));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    History(seed).run();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(BranchRows, ARowIsCopiedOnceForAllThatShareIt) {
  std::vector<float> home = zeros();
  BranchRows rows(home, kFloats);
  const std::vector<phub::geeps::Run> two = {{0, 4, 1}, {1, 9, 1}};
  rows.keep(two);
  EXPECT_EQ(rows.bytes(), 0u);  // there is one branch
  for (const uint32_t child : {1, 2, 3}) rows.fork_running(child);
  EXPECT_EQ(rows.bytes(), 3 * kIndexBytes);
  rows.keep(two);
  EXPECT_EQ(rows.bytes(), 3 * kIndexBytes + 2 * kRowBytes);
  home[4 * kFloats] = 7;
  rows.keep(two);
  rows.enter(2, 0);
  EXPECT_EQ(home[4 * kFloats], 0);
  EXPECT_EQ(rows.bytes(), 3 * kIndexBytes + 2 * kRowBytes);
  rows.retain({0, 2});
  EXPECT_EQ(rows.bytes(), kIndexBytes + 2 * kRowBytes);
  rows.retain({2});
  EXPECT_EQ(rows.bytes(), 0u);
}

TEST(BranchRows, WhatIsUnknownIsRefused) {
  std::vector<float> home = zeros();
  BranchRows rows(home, kFloats);
  home[0] = 5;
  expect_error(phub::ErrorCode::kInternal, "branch 7", [&] { rows.fork(7, 8); });
  expect_error(phub::ErrorCode::kInternal, "branch 8", [&] { rows.enter(8, 0); });
  EXPECT_EQ(home[0], 5);
  EXPECT_EQ(rows.bytes(), 0u);
}

// Every length and number is looked at.
TEST(BranchRows, WhatWasDamagedIsRefused) {
  std::vector<float> home = zeros();
  BranchRows rows(home, kFloats);
  rows.fork_running(1);
  const std::vector<phub::geeps::Run> all = {{0, 0, kRows}};
  rows.keep(all);
  rows.fork(1, 2);
  const std::vector<std::byte> saved = rows.saved();
  const auto refused = [&](std::vector<std::byte> damaged) {
    BranchRows other(home, kFloats);
    EXPECT_NE(
        error_of(ErrorCode::kMismatch, [&] { other.restore(damaged, "speeds"); }).find("'speeds'"),
        std::string::npos);
  };
  for (size_t bytes = 0; bytes < saved.size(); bytes += 1 + bytes % 5) {
    refused({saved.begin(), saved.begin() + static_cast<ptrdiff_t>(bytes)});
  }
  for (const size_t word : {0, 1, 2, 3, 4}) {  // branches, copies, a branch twice, places
    std::vector<std::byte> damaged = saved;
    damaged[word * 4] = std::byte{2};
    damaged[word * 4 + 3] = std::byte{0x70};
    if (word == 2) std::fill_n(damaged.begin() + 8, 4, std::byte{0}), damaged[8] = std::byte{2};
    refused(damaged);
  }
  std::vector<std::byte> damaged = saved;
  damaged[4] = std::byte{kRows + 1};  // a copy that nobody has
  damaged.resize(saved.size() + kFloats * sizeof(float));
  refused(damaged);
  damaged = saved;
  damaged[3 * 4] = std::byte{1};  // two rows in one copy
  refused(damaged);
  std::mt19937_64 random(fresh_seeds(1).first);
  for (int i = 0; i < 1000; ++i) {  // whatever it is, it ends
    damaged = saved;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    BranchRows other(home, kFloats);
    try {
      other.restore(damaged, "speeds");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    }
  }
}

}  // namespace branch_rows_test
}  // namespace phub::geeps
