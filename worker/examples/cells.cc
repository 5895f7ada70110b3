#include "worker/examples/cells.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "transport/error.h"
#include "worker/examples/files.h"

namespace phub::examples {
namespace {

constexpr uint32_t kHeldOut = 10;  // one in so many

// Names in the order in which they come.
class Numbers {
 public:
  explicit Numbers(std::vector<std::string>& names) : names_(names) {}
  uint32_t of(std::string_view name) {
    const auto [at, is_new] =
        numbers_.try_emplace(std::string(name), static_cast<uint32_t>(names_.size()));
    if (is_new) names_.emplace_back(name);
    return at->second;
  }

 private:
  std::vector<std::string>& names_;
  std::unordered_map<std::string, uint32_t> numbers_;
};

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

bool is_separator(char c) {
  return c == ' ' || c == '\t' || c == ',' || c == ':' || c == '\r' || c == '\n';
}

// Cuts the next word off.
std::string_view next_word(std::string_view& line) {
  const size_t begin =
      static_cast<size_t>(std::ranges::find_if_not(line, is_separator) - line.begin());
  line.remove_prefix(begin);
  const size_t end = static_cast<size_t>(std::ranges::find_if(line, is_separator) - line.begin());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end);
  return word;
}

bool parse(const std::string& word, double& value) {
  char* end = nullptr;
  value = std::strtod(word.c_str(), &end);
  return !word.empty() && *end == '\0';
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

}  // namespace

Cells read_tags(const std::string& path, uint32_t zeros, uint64_t seed) {
  std::ifstream file = open_to_read(path);
  Cells matrix;
  Numbers rows(matrix.rows), columns(matrix.columns);
  std::string package;
  bool in_tags = false;
  for (std::string line; std::getline(file, line);) {
    std::string_view rest = line;
    if (rest.starts_with("Package: ")) package = line.substr(9);
    in_tags = rest.starts_with("Tag: ") || (in_tags && rest.starts_with(' '));
    if (!in_tags || package.empty()) continue;
    if (!rest.starts_with(' ')) rest.remove_prefix(5);
    // "use::gameplaying, x11::application"
    for (size_t end = 0; !rest.empty(); rest.remove_prefix(std::min(end + 1, rest.size()))) {
      end = std::min(rest.find(','), rest.size());
      const std::string_view tag = rest.substr(0, end);
      const size_t begin = tag.find_first_not_of(' ');
      if (begin == tag.npos) continue;
      matrix.cells.push_back(
          {.row = rows.of(package), .column = columns.of(tag.substr(begin)), .value = 1});
    }
  }
  if (matrix.cells.empty()) {
    fail(ErrorCode::kInvalid, "{} has no packages with tags: make it with `apt-cache dumpavail`",
         path);
  }
  sort(matrix.cells);
  add_zeros(matrix, zeros, seed);
  sort(matrix.cells);
  return matrix;
}

Cells read_cells(const std::string& path) {
  std::ifstream file = open_to_read(path);
  Cells matrix;
  Numbers rows(matrix.rows), columns(matrix.columns);
  uint64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::string_view rest = line;
    const std::string_view row = next_word(rest), column = next_word(rest);
    if (row.empty()) continue;
    double value = 0;
    const bool is_number = parse(std::string(next_word(rest)), value);
    if (number == 1 && !is_number) continue;
    if (!is_number || !std::isfinite(value)) {
      fail(ErrorCode::kInvalid, "{}, line {}: it is not a row, a column and a finite number", path,
           number);
    }
    matrix.cells.push_back({rows.of(row), columns.of(column), value});
  }
  if (matrix.cells.empty()) {
    fail(ErrorCode::kInvalid, "{} has no lines with a row, a column and a value", path);
  }
  sort(matrix.cells);
  return matrix;
}

std::vector<Cell> take_held_out(Cells& cells, uint64_t seed) {
  const auto stays = [&](const Cell& cell) {
    return mixed(mixed(seed + 1) ^ (uint64_t{cell.row} << 32 | cell.column)) % kHeldOut != 0;
  };
  const auto out = std::stable_partition(cells.cells.begin(), cells.cells.end(), stays);
  std::vector<Cell> held_out(out, cells.cells.end());
  cells.cells.erase(out, cells.cells.end());
  return held_out;
}

}  // namespace phub::examples
