#include "worker/examples/readers/cells.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/matrix_market.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

constexpr std::string_view kSpaces = " ", kTabs = "\t", kCommas = ",", kColons = "::";
constexpr const char* kNames = "no name is empty or has spaces, or quotes between commas";
constexpr uint64_t kShares = 1'000'000;  // a share is so many of these

std::pair<uint32_t, uint32_t> place_of(const Cell& cell) { return {cell.row, cell.column}; }

void sort(std::vector<Cell>& cells) {
  std::ranges::stable_sort(cells, {}, place_of);
  size_t kept = 0;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (i + 1 < cells.size() && place_of(cells[i]) == place_of(cells[i + 1])) continue;
    cells[kept++] = cells[i];
  }
  cells.resize(kept);
}

uint64_t mixed(uint64_t h) {
  h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9;
  h = (h ^ h >> 27) * 0x94D049BB133111EB;
  return h ^ h >> 31;
}

void add_zeros(Cells& matrix, uint32_t zeros, uint64_t seed) {
  const std::vector<Cell> ones = matrix.cells;
  const uint64_t all = uint64_t{matrix.rows.size()} * matrix.columns.size();
  const uint64_t wanted = std::min(ones.size() * uint64_t{zeros}, (all - ones.size()) / 2);
  std::mt19937_64 draw(seed);
  std::vector<Cell> drawn;
  while (drawn.size() < wanted) {
    while (drawn.size() < wanted) {
      drawn.push_back({.row = static_cast<uint32_t>(draw() % matrix.rows.size()),
                       .column = static_cast<uint32_t>(draw() % matrix.columns.size())});
      if (std::ranges::binary_search(ones, place_of(drawn.back()), {}, place_of)) drawn.pop_back();
    }
    sort(drawn);
  }
  matrix.cells.insert(matrix.cells.end(), drawn.begin(), drawn.end());
}

// What is between the fields of a line: in a .csv commas, else what comes first in it.
std::string_view separator_of(std::string_view line, bool is_csv) {
  if (is_csv) return kCommas;
  const size_t at = std::min(line.find_first_of(" \t,"), line.find(kColons));
  if (at == line.npos || line[at] == ' ') return kSpaces;
  return line[at] == '\t' ? kTabs : line[at] == ',' ? kCommas : kColons;
}

// Cuts the next field off. Only spaces in a row count as one, as other fields may be empty.
std::string_view cut_field(std::string_view& rest, std::string_view separator) {
  if (separator == kSpaces) return next_word(rest);
  const std::string_view field = rest.substr(0, rest.find(separator));
  rest.remove_prefix(std::min(field.size() + separator.size(), rest.size()));
  return trimmed(field);
}

struct Place {
  Place(std::string_view line, bool is_csv)
      : separator(separator_of(line, is_csv)),
        rest(line),
        row(cut_field(rest, separator)),
        column(cut_field(rest, separator)) {}
  bool has_names() const {
    const auto is_name = [&](std::string_view word) {
      return !word.empty() &&
             word.find_first_of(separator == kCommas ? " \t\"" : " \t") == word.npos;
    };
    return is_name(row) && is_name(column);
  }

  std::string_view separator, rest, row, column;
};

// "user" of "userId", "User-ID" and "user_id".
std::string kind_of(std::string_view word) {
  std::string kind;
  for (const char c : word) {
    if (c != '_' && c != '-' && c != '"')
      kind += static_cast<char>(c >= 'A' && c <= 'Z' ? c | 0x20 : c);
  }
  if (kind.ends_with("id")) kind.resize(kind.size() - 2);
  return kind;
}

// Without a value only words tell a heading from names.
bool is_heading_of_pairs(const Place& place) {
  constexpr std::array kRows{"user", "row"};
  constexpr std::array kColumns{"item", "movie", "film", "column"};
  return std::ranges::find(kRows, kind_of(place.row)) != kRows.end() &&
         std::ranges::find(kColumns, kind_of(place.column)) != kColumns.end();
}

bool has_number(std::string_view line, std::string_view separator) {
  while (!line.empty()) {
    if (number_in(cut_field(line, separator))) return true;
  }
  return false;
}

}  // namespace

Cells read_tags(const std::string& path, uint32_t zeros, uint64_t seed) {
  Lines lines(path);
  Cells matrix;
  Names rows(matrix.rows), columns(matrix.columns);
  std::string package;
  bool in_tags = false;
  while (const auto line = lines.next()) {
    std::string_view rest = *line;
    if (rest.starts_with("Package: ")) package = rest.substr(9);
    in_tags = rest.starts_with("Tag: ") || (in_tags && rest.starts_with(' '));
    if (!in_tags || package.empty()) continue;
    if (!rest.starts_with(' ')) rest.remove_prefix(5);
    // "use::gameplaying, x11::application"
    while (!rest.empty()) {
      const std::string_view tag = next_field(rest, ',');
      if (tag.empty()) continue;
      const uint32_t row = rows.of(package, lines);
      matrix.cells.push_back({.row = row, .column = columns.of(tag, lines), .value = 1});
    }
  }
  if (matrix.cells.empty()) {
    fail(ErrorCode::kInvalid, "{} has no packages with tags: make it with `apt-cache dumpavail`",
         path);
  }
  sort(matrix.cells);
  add_zeros(matrix, zeros, seed);
  sort(matrix.cells);
  matrix.digest = lines.digest();
  return matrix;
}

Cells read_cells(const std::string& path) {
  Cells matrix;
  Names rows(matrix.rows), columns(matrix.columns);
  const auto add = [&](std::string_view row, std::string_view column, double value,
                       const Lines& lines) {
    const uint32_t of_row = rows.of(row, lines);
    matrix.cells.push_back({of_row, columns.of(column, lines), value});
  };
  if (MatrixMarket::is_name_of_one(path)) {
    MatrixMarket entries(path);
    while (const auto entry = entries.next()) {
      add(std::to_string(entry->row), std::to_string(entry->column), entry->value, entries.lines());
    }
    matrix.digest = entries.lines().digest();
  } else {
    Lines lines(path);
    const bool is_csv = extension_of(path) == "csv";
    for (bool first = true; const auto line = lines.next_data(); first = false) {
      Place place(*line, is_csv);
      const std::string_view word = cut_field(place.rest, place.separator);
      const std::optional<double> value = number_in(word);
      if (first && !word.empty() && !has_number(*line, place.separator)) continue;  // a heading
      if (!place.has_names() || !value || !std::isfinite(*value)) {
        lines.refuse("'{}' is not a row, a column and a finite number; {}", shown(*line), kNames);
      }
      add(place.row, place.column, *value, lines);
    }
    matrix.digest = lines.digest();
  }
  if (matrix.cells.empty()) {
    fail(ErrorCode::kInvalid, "{} has no lines with a row, a column and a value", path);
  }
  sort(matrix.cells);
  return matrix;
}

std::vector<std::pair<std::string, std::string>> read_pairs(const std::string& path) {
  std::vector<std::pair<std::string, std::string>> pairs;
  if (MatrixMarket::is_name_of_one(path)) {
    MatrixMarket entries(path);
    while (const auto entry = entries.next()) {
      pairs.emplace_back(std::to_string(entry->row), std::to_string(entry->column));
    }
  } else {
    Lines lines(path);
    const bool is_csv = extension_of(path) == "csv";
    for (bool first = true; const auto line = lines.next_data(); first = false) {
      const Place place(*line, is_csv);
      if (first && is_heading_of_pairs(place)) continue;
      if (!place.has_names()) {
        lines.refuse("'{}' is not a row and a column; {}", shown(*line), kNames);
      }
      pairs.emplace_back(place.row, place.column);
    }
  }
  if (pairs.empty()) fail(ErrorCode::kInvalid, "{} has no lines with a row and a column", path);
  return pairs;
}

std::vector<Cell> take_held_out(Cells& cells, double share, uint64_t seed) {
  const auto wanted = static_cast<uint64_t>(std::llround(share * static_cast<double>(kShares)));
  const auto stays = [&](const Cell& cell) {
    return mixed(mixed(seed + 1) ^ (uint64_t{cell.row} << 32 | cell.column)) % kShares >= wanted;
  };
  const auto out = std::stable_partition(cells.cells.begin(), cells.cells.end(), stays);
  std::vector<Cell> held_out(out, cells.cells.end());
  cells.cells.erase(out, cells.cells.end());
  return held_out;
}

}  // namespace phub::examples
