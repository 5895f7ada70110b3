// Matrices of few entries in the Matrix Market's coordinate format, as scipy.io.mmwrite and
// gensim's MmCorpus write them (https://math.nist.gov/MatrixMarket/formats.html).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "worker/examples/readers/lines.h"

namespace phub::examples {

// Entry after entry. Errors name the file and the line.
class MatrixMarket {
 public:
  struct Entry {
    uint64_t row = 0, column = 0;  // from 1
    double value = 0;              // finite; 1 in a matrix of the kind "pattern"
  };

  // Whether the file's name ends like one of such a matrix.
  static bool is_name_of_one(const std::string& path);

  // Reads the head. Throws Error(kInvalid): the file has none, or is not of real or whole numbers.
  explicit MatrixMarket(const std::string& path);
  uint64_t rows() const { return rows_; }  // as the file says: not a size to reserve
  uint64_t columns() const { return columns_; }

  // nullopt after the last one. What a symmetric matrix does not say twice comes twice. Throws
  // Error(kInvalid): no entry, one outside of the matrix, more or fewer than the head says.
  std::optional<Entry> next();
  const Lines& lines() const { return lines_; }

 private:
  void read_kind();
  void read_size();

  Lines lines_;
  uint64_t rows_ = 0, columns_ = 0, entries_ = 0, seen_ = 0;
  bool has_values_ = true;
  double mirrored_by_ = 0;  // 1: symmetric, -1: skew-symmetric
  std::optional<Entry> mirrored_;
};

}  // namespace phub::examples
