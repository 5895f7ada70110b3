#include "worker/geeps/branch_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/error.h"
#include "worker/bytes.h"

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

void BranchRows::keep(std::span<const Run> runs, uint32_t first) {
  const std::lock_guard lock(mutex_);
  if (branches_.empty()) return;
  for (const Run& run : runs) {
    for (uint32_t r = first + run.source; r < first + run.source + run.rows; ++r) {
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
  constexpr uint64_t kBesideARow = 24;  // a pointer, and what the allocator keeps
  const uint64_t copies = copies_.size() - free_.size();
  return copies * (row_floats_ * sizeof(float) + kBesideARow) +
         branches_.size() * rows_ * sizeof(uint32_t);
}

// Numbers of branches and of copies; of each branch its number and its places; the copies.
std::vector<std::byte> BranchRows::saved() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> numbers(copies_.size());
  uint32_t there = 0;
  for (uint32_t copy = 0; copy < copies_.size(); ++copy) {
    if (copies_[copy]) numbers[copy] = there++;
  }
  std::vector<std::byte> saved;
  append_value(saved, static_cast<uint32_t>(branches_.size()));
  append_value(saved, there);
  for (const auto& [branch, places] : branches_) {
    append_value(saved, branch);
    for (const uint32_t place : places) {
      append_value(saved, place == kHome ? kHome : numbers[place]);
    }
  }
  for (const auto& copy : copies_) {
    if (copy) append_array<float>(saved, {copy.get(), row_floats_});
  }
  return saved;
}

void BranchRows::restore(std::span<const std::byte> saved, const std::string& what) {
  const std::lock_guard lock(mutex_);
  ByteReader reader(saved,
                    fmt::format("the rows of '{}' by branch were saved of another table", what));
  const auto branches = reader.value<uint32_t>(), copies = reader.value<uint32_t>();
  std::map<uint32_t, Places> all;
  for (uint32_t i = 0; i < branches; ++i) {
    const auto branch = reader.value<uint32_t>();
    all[branch] = reader.array<uint32_t>(rows_);
  }
  reader.check(all.size() == branches);
  const std::vector<float> rows = reader.array<float>(uint64_t{copies} * row_floats_);
  reader.check(reader.at_end());
  std::vector<uint32_t> row_of(copies, kHome);
  for (const auto& [branch, places] : all) {
    for (uint32_t r = 0; r < rows_; ++r) {
      if (places[r] == kHome) continue;
      reader.check(places[r] < copies);
      uint32_t& of = row_of[places[r]];
      reader.check(of == kHome || of == r);
      of = r;
    }
  }
  reader.check(std::ranges::find(row_of, kHome) == row_of.end());  // nobody has such a copy
  copies_.clear();
  free_.clear();
  for (uint32_t copy = 0; copy < copies; ++copy) {
    std::copy_n(&rows[size_t{copy} * row_floats_], row_floats_, copies_[add_copy()].get());
  }
  branches_ = std::move(all);
}

}  // namespace phub::geeps
