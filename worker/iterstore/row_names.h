// The place of each row in a table with spare rows. All ranks have the same, since all make the
// same changes in the same order.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/iterstore/store.h"

namespace phub::iterstore {

class RowNames {
 public:
  // Rows 0 to rows − 1 begin in the places of their numbers.
  RowNames(uint64_t rows, uint64_t spare);

  std::optional<uint64_t> place(uint64_t row) const {
    if (row < row_at_.size() && row_at_[row] == row) return row;
    const auto moved = moved_.find(row);
    return moved == moved_.end() ? std::nullopt : std::optional(moved->second);
  }
  uint64_t free_places() const { return free_.size() + (row_at_.size() - used_); }
  const std::vector<uint64_t>& row_at() const { return row_at_; }  // by place; kNoRow: it is free

  void add(uint64_t row);         // takes the first free place. REQUIRES: there is one, no such row
                                  // REQUIRES: there is one, no such row
  uint64_t remove(uint64_t row);  // returns its place. REQUIRES: there is such a row

 private:
  std::vector<uint64_t> row_at_;
  std::unordered_map<uint64_t, uint64_t> moved_;  // places of rows that are not their numbers
  uint64_t used_;                                 // places from here on were never used
  std::set<uint64_t> free_;                       // free places below used_
};

// A change that a thread asks for; `change` 0: none.
struct RowChange {
  enum : uint64_t { kNone, kAdd, kDelete };
  uint64_t change = kNone;
  uint64_t table = 0;
  uint64_t row = 0;
};

// The changes that a thread asks for in a clock.
struct AskedChanges {
  std::vector<RowChange> changes;
  std::set<std::pair<uint64_t, uint64_t>> rows;       // table and row of each of the changes
  std::unordered_map<uint64_t, int64_t> more_places;  // by table: places that they free, less those
                                                      // that they take
};

}  // namespace phub::iterstore
