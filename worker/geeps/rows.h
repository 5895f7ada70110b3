// The rows of a table, by key, and how lists of them lie in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace phub::geeps {

// Rows that follow one another on both sides.
struct Run {
  uint32_t first;   // here
  uint32_t source;  // there
  uint32_t rows;
  bool operator==(const Run&) const = default;
};

// `first` counts the positions of `sources`, from `first_position` on.
std::vector<Run> runs_of(std::span<const uint32_t> sources, uint32_t first_position = 0);
// Positions and sources, pair by pair.
std::vector<Run> runs_of(std::span<const uint32_t> positions, std::span<const uint32_t> sources);

// Key -> row. Keys 0, 1, 2, … need no table.
class RowMap {
 public:
  explicit RowMap(std::span<const uint64_t> keys);
  std::optional<uint32_t> find(uint64_t key) const;
  uint32_t rows() const { return rows_; }

 private:
  uint32_t rows_;
  bool dense_;
  std::unordered_map<uint64_t, uint32_t> row_of_;
};

}  // namespace phub::geeps
