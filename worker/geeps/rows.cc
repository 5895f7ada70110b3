#include "worker/geeps/rows.h"

#include <algorithm>
#include <limits>

#include "transport/error.h"

namespace phub::geeps {
namespace {

void append(std::vector<Run>& runs, uint32_t first, uint32_t source) {
  if (!runs.empty()) {
    Run& last = runs.back();
    if (last.first + last.rows == first && last.source + last.rows == source) {
      ++last.rows;
      return;
    }
  }
  runs.push_back({first, source, 1});
}

}  // namespace

std::vector<Run> runs_of(std::span<const uint32_t> sources, uint32_t first_position) {
  std::vector<Run> runs;
  for (const uint32_t source : sources) append(runs, first_position++, source);
  return runs;
}

std::vector<Run> runs_of(std::span<const uint32_t> positions, std::span<const uint32_t> sources) {
  PHUB_CHECK(positions.size() == sources.size());
  std::vector<Run> runs;
  for (size_t i = 0; i < positions.size(); ++i) append(runs, positions[i], sources[i]);
  return runs;
}

Stretch stretch_of(std::span<const Run> runs) {
  if (runs.empty()) return {};
  uint32_t begin = runs.front().first, end = begin;
  for (const Run& run : runs) {
    begin = std::min(begin, run.first);
    end = std::max(end, run.first + run.rows);
  }
  return {begin, end - begin};
}

void join_overlapping(std::vector<Stretch*> stretches) {
  std::erase_if(stretches, [](const Stretch* stretch) { return stretch->rows == 0; });
  std::ranges::sort(stretches, {}, &Stretch::first);
  for (size_t begin = 0, end = 0; begin < stretches.size(); begin = end) {
    Stretch joined = *stretches[begin];
    while (end < stretches.size() && stretches[end]->first < joined.first + joined.rows) {
      const uint32_t last = stretches[end]->first + stretches[end]->rows;
      joined.rows = std::max(joined.rows, last - joined.first);
      ++end;
    }
    for (size_t i = begin; i < end; ++i) *stretches[i] = joined;
  }
}

std::pair<uint32_t, uint32_t> RowSplit::range_of(uint32_t piece) const {
  const uint64_t begin = uint64_t{piece} * rows_per_piece;
  const uint64_t end = std::min<uint64_t>(begin + rows_per_piece, rows);
  return {static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
}

RowMap::RowMap(std::span<const uint64_t> keys) : rows_(static_cast<uint32_t>(keys.size())) {
  PHUB_CHECK(keys.size() <= std::numeric_limits<uint32_t>::max());
  dense_ = true;
  for (uint32_t row = 0; row < rows_ && dense_; ++row) dense_ = keys[row] == row;
  if (dense_) return;
  row_of_.reserve(rows_);
  for (uint32_t row = 0; row < rows_; ++row) row_of_.emplace(keys[row], row);
}

std::optional<uint32_t> RowMap::find(uint64_t key) const {
  if (dense_) return key < rows_ ? std::optional(static_cast<uint32_t>(key)) : std::nullopt;
  const auto found = row_of_.find(key);
  return found == row_of_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace phub::geeps
