// The rows of a table by their keys, and lists of rows as runs in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace phub::geeps {

// Rows that are neighbours in two places.
struct Run {
  uint32_t first;   // index in the first place
  uint32_t source;  // index in the second place
  uint32_t rows;
  bool operator==(const Run&) const = default;
};

// The runs of sources[i] at position first_position + i.
std::vector<Run> runs_of(std::span<const uint32_t> sources, uint32_t first_position = 0);
// The runs of sources[i] at positions[i].
std::vector<Run> runs_of(std::span<const uint32_t> positions, std::span<const uint32_t> sources);

// Rows of a buffer from one of a list to another, and the rows between them.
struct Stretch {
  uint32_t first = 0, rows = 0;
  bool operator==(const Stretch&) const = default;
};
// The stretch from the first to the last of the runs' rows in the first place.
Stretch stretch_of(std::span<const Run> runs);
// Joins stretches that overlap: each becomes the one that has them all.
void join_overlapping(std::vector<Stretch*> stretches);

// Divides the rows of a table into pieces: contiguous ranges of equal size. The last may be
// smaller.
struct RowSplit {
  uint32_t rows = 0;
  uint32_t rows_per_piece = 1;

  uint32_t pieces() const {
    return static_cast<uint32_t>((uint64_t{rows} + rows_per_piece - 1) / rows_per_piece);
  }
  uint32_t piece_of(uint32_t row) const { return row / rows_per_piece; }
  std::pair<uint32_t, uint32_t> range_of(uint32_t piece) const;  // [begin, end)
};

// A map from keys to rows. For keys 0, 1, 2, … it takes no memory.
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
