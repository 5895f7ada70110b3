#include "worker/iterstore/row_names.h"

#include <numeric>

namespace phub::iterstore {

RowNames::RowNames(uint64_t rows, uint64_t spare) : row_at_(rows + spare, kNoRow), used_(rows) {
  std::iota(row_at_.begin(), row_at_.begin() + static_cast<ptrdiff_t>(rows), 0);
}

void RowNames::add(uint64_t row) {
  const uint64_t at = free_.empty() ? used_++ : *free_.begin();
  free_.erase(at);
  row_at_[at] = row;
  if (at != row) moved_.emplace(row, at);
}

uint64_t RowNames::remove(uint64_t row) {
  const uint64_t at = *place(row);
  moved_.erase(row);
  row_at_[at] = kNoRow;
  free_.insert(at);
  return at;
}

}  // namespace phub::iterstore
