#include "worker/geeps/branch_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub::geeps {

BranchRows::BranchRows(std::span<float> home, uint32_t row_floats)
    : home_(home),
      row_floats_(row_floats),
      rows_(static_cast<uint32_t>(home.size() / row_floats)) {}

uint32_t BranchRows::add_copy() {
  if (free_.empty()) {
    copies_.emplace_back();
    free_.push_back(static_cast<uint32_t>(copies_.size() - 1));
  }
  const uint32_t copy = free_.back();
  copies_[copy] = std::make_unique<float[]>(row_floats_);
  free_.pop_back();
  return copy;
}

void BranchRows::keep(std::span<const Run> runs) {
  const std::lock_guard lock(mutex_);
  if (branches_.empty()) return;
  for (const Run& run : runs) {
    for (uint32_t r = run.source; r < run.source + run.rows; ++r) {
      uint32_t copy = kHome;
      for (auto& [branch, places] : branches_) {
        if (places[r] != kHome) continue;
        if (copy == kHome) {
          copy = add_copy();
          std::ranges::copy(row(r), copies_[copy].get());
        }
        places[r] = copy;
      }
    }
  }
}

void BranchRows::fork_running(uint32_t child) {
  const std::lock_guard lock(mutex_);
  branches_[child] = Places(rows_, kHome);
}

std::map<uint32_t, BranchRows::Places>::iterator BranchRows::find(uint32_t branch) {
  const auto found = branches_.find(branch);
  if (found != branches_.end()) return found;
  fail(ErrorCode::kInternal, "a local table has no rows of branch {}", branch);
}

void BranchRows::fork(uint32_t parent, uint32_t child) {
  const std::lock_guard lock(mutex_);
  branches_.insert_or_assign(child, Places(find(parent)->second));
}

// What a branch has where its row is not at home changes places with the home, for all branches.
void BranchRows::enter(uint32_t branch, uint32_t before) {
  const std::lock_guard lock(mutex_);
  const auto found = find(branch);
  Places places = std::move(found->second);
  branches_.erase(found);
  for (uint32_t r = 0; r < rows_; ++r) {
    const uint32_t copy = places[r];
    if (copy == kHome) continue;
    std::ranges::swap_ranges(row(r), std::span(copies_[copy].get(), row_floats_));
    for (auto& [other, of_other] : branches_) {
      if (of_other[r] == kHome) {
        of_other[r] = copy;
      } else if (of_other[r] == copy) {
        of_other[r] = kHome;
      }
    }
  }
  branches_[before] = std::move(places);
}

void BranchRows::retain(const std::set<uint32_t>& branches) {
  const std::lock_guard lock(mutex_);
  const auto gone = [&](const auto& each) { return !branches.contains(each.first); };
  if (std::erase_if(branches_, gone) == 0) return;
  std::vector<bool> used(copies_.size());
  for (const auto& [branch, places] : branches_) {
    for (const uint32_t place : places) {
      if (place != kHome) used[place] = true;
    }
  }
  free_.clear();
  for (uint32_t copy = 0; copy < copies_.size(); ++copy) {
    if (used[copy]) continue;
    copies_[copy].reset();
    free_.push_back(copy);
  }
}

uint64_t BranchRows::bytes() const {
  const std::lock_guard lock(mutex_);
  return (copies_.size() - free_.size()) * row_floats_ * sizeof(float) +
         branches_.size() * rows_ * sizeof(uint32_t);
}

namespace {

constexpr size_t kWord = sizeof(uint32_t);

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  const size_t at = to.size();
  to.resize(at + bytes.size());
  std::memcpy(to.data() + at, bytes.data(), bytes.size());
}
void append(std::vector<std::byte>& to, uint32_t word) {
  append(to, std::as_bytes(std::span(&word, 1)));
}

}  // namespace

// Numbers of branches and of copies; of each branch its number and its places; the copies.
std::vector<std::byte> BranchRows::saved() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> numbers(copies_.size());
  uint32_t there = 0;
  for (uint32_t copy = 0; copy < copies_.size(); ++copy) {
    if (copies_[copy]) numbers[copy] = there++;
  }
  std::vector<std::byte> saved;
  append(saved, static_cast<uint32_t>(branches_.size()));
  append(saved, there);
  for (const auto& [branch, places] : branches_) {
    append(saved, branch);
    for (const uint32_t place : places) append(saved, place == kHome ? kHome : numbers[place]);
  }
  for (const auto& copy : copies_) {
    if (copy) append(saved, std::as_bytes(std::span(copy.get(), row_floats_)));
  }
  return saved;
}

void BranchRows::restore(std::span<const std::byte> saved, const std::string& what) {
  const std::lock_guard lock(mutex_);
  const auto check = [&](bool holds) {
    if (holds) return;
    fail(ErrorCode::kMismatch, "the rows of '{}' by branch were saved of another table", what);
  };
  const auto take = [&](void* to, size_t bytes) {
    check(saved.size() >= bytes);
    std::memcpy(to, saved.data(), bytes);
    saved = saved.subspan(bytes);
  };
  const auto word = [&] {
    uint32_t word = 0;
    take(&word, kWord);
    return word;
  };
  const uint32_t branches = word(), copies = word();
  check(branches <= saved.size() / (kWord * (uint64_t{rows_} + 1)));
  std::map<uint32_t, Places> all;
  std::vector<uint32_t> row_of(std::min<uint64_t>(copies, saved.size()), kHome);
  check(row_of.size() == copies);
  for (uint32_t i = 0; i < branches; ++i) {
    Places& places = all[word()];
    places.resize(rows_);
    take(places.data(), rows_ * kWord);
    for (uint32_t r = 0; r < rows_; ++r) {
      if (places[r] == kHome) continue;
      check(places[r] < copies);
      uint32_t& of = row_of[places[r]];
      check(of == kHome || of == r);
      of = r;
    }
  }
  check(all.size() == branches && saved.size() == uint64_t{copies} * row_floats_ * sizeof(float));
  copies_.clear();
  free_.clear();
  for (uint32_t copy = 0; copy < copies; ++copy) {
    take(copies_[add_copy()].get(), row_floats_ * sizeof(float));
  }
  branches_ = std::move(all);
}

}  // namespace phub::geeps
