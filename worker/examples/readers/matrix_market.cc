#include "worker/examples/readers/matrix_market.h"

#include <cmath>
#include <string_view>

namespace phub::examples {
namespace {

constexpr uint64_t kMostRows = 0xffff'fffe;  // and columns

std::string in_small_letters(std::string_view word) {
  std::string text(word);
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c | 0x20 : c);
  return text;
}

}  // namespace

bool MatrixMarket::is_name_of_one(const std::string& path) {
  const std::string extension = extension_of(path);
  return extension == "mtx" || extension == "mm";
}

MatrixMarket::MatrixMarket(const std::string& path) : lines_(path) {
  read_kind();
  read_size();
}

void MatrixMarket::read_kind() {
  std::string_view line = lines_.next().value_or("");
  const std::string mark = in_small_letters(next_word(line));
  const std::string object = in_small_letters(next_word(line));
  const std::string format = in_small_letters(next_word(line));
  const std::string field = in_small_letters(next_word(line));
  const std::string symmetry = in_small_letters(next_word(line));
  if (mark != "%%matrixmarket" || object != "matrix") {
    lines_.refuse(
        "a file of this name begins with '%%MatrixMarket matrix coordinate real general'");
  }
  if (format != "coordinate") {
    lines_.refuse(
        "'{}' matrices are not read, only 'coordinate': scipy.io.mmwrite writes one of a "
        "sparse matrix",
        shown(format));
  }
  if (field != "real" && field != "integer" && field != "pattern") {
    lines_.refuse("'{}' values are not read, only real, integer and pattern", shown(field));
  }
  has_values_ = field != "pattern";
  if (symmetry == "symmetric") {
    mirrored_by_ = 1;
  } else if (symmetry == "skew-symmetric") {
    mirrored_by_ = -1;
  } else if (symmetry != "general") {
    lines_.refuse("'{}' matrices are not read, only general, symmetric and skew-symmetric",
                  shown(symmetry));
  }
}

void MatrixMarket::read_size() {
  std::string_view line = lines_.next_data().value_or("");
  const auto rows = whole_number_in(next_word(line));
  const auto columns = whole_number_in(next_word(line));
  const auto entries = whole_number_in(next_word(line));
  if (!rows || !columns || !entries || !trimmed(line).empty()) {
    lines_.refuse("here a matrix has its numbers of rows, columns and entries");
  }
  if (*rows > kMostRows || *columns > kMostRows) {
    lines_.refuse("a matrix of {} rows and {} columns: {} are the most", *rows, *columns,
                  kMostRows);
  }
  if (mirrored_by_ != 0 && *rows != *columns) {
    lines_.refuse("a symmetric matrix has as many rows as columns, not {} and {}", *rows, *columns);
  }
  rows_ = *rows, columns_ = *columns, entries_ = *entries;
}

std::optional<MatrixMarket::Entry> MatrixMarket::next() {
  if (mirrored_) return std::exchange(mirrored_, std::nullopt);
  const std::optional<std::string_view> line = lines_.next_data();
  if (!line) {
    if (seen_ == entries_) return std::nullopt;
    lines_.refuse("the file ends after {} entries, and its head says {}: is it cut off?", seen_,
                  entries_);
  }
  if (seen_++ == entries_) lines_.refuse("this is an entry more than the {} of the head", entries_);
  std::string_view rest = *line;
  const auto row = whole_number_in(next_word(rest));
  const auto column = whole_number_in(next_word(rest));
  const auto value = has_values_ ? number_in(next_word(rest)) : 1;
  if (!row || !column || !value || !trimmed(rest).empty() || !std::isfinite(*value)) {
    lines_.refuse("'{}' is not a row, a column{}", shown(*line),
                  has_values_ ? " and a finite number" : " and no more");
  }
  if (*row < 1 || *row > rows_ || *column < 1 || *column > columns_) {
    lines_.refuse("entry {}, {} is outside of the {} rows and {} columns, which count from 1", *row,
                  *column, rows_, columns_);
  }
  const Entry entry{.row = *row, .column = *column, .value = *value};
  if (mirrored_by_ != 0 && *row != *column) {
    mirrored_ = Entry{.row = *column, .column = *row, .value = mirrored_by_ * *value};
  }
  return entry;
}

}  // namespace phub::examples
