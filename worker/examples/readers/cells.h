// The cells of a large matrix of which few are known, for its factorisation.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace phub::examples {

struct Cell {
  uint32_t row = 0, column = 0;
  double value = 0;
};

struct Cells {
  std::vector<std::string> rows, columns;  // names, by number
  std::vector<Cell> cells;                 // by row, then column, each once
  uint64_t digest = 0;                     // of the file
};

// Packages and their tags, from a file with the output of `apt-cache dumpavail`: 1 where a package
// has a tag, and `zeros` cells with 0 for each of these, drawn among the others. Throws
// Error(kNotFound): there is no such file; Error(kInvalid): it has no tags.
Cells read_tags(const std::string& path, uint32_t zeros, uint64_t seed);
// Lines "row column value"; between fields are commas in a .csv, and else what comes first in the
// line: spaces, a tab, a comma or "::". The rest of a line is not looked at, nor a first line
// without any number (MovieLens' ratings.csv and u.data are of this form), nor empty lines and
// those that begin with # or %. Or a matrix (matrix_market.h) in a file .mtx or .mm: then names are
// its numbers, which count from 1. If a cell comes twice the last value counts. Errors as above,
// with the line.
Cells read_cells(const std::string& path);
// Names of rows and columns, in the order of the file: lines "row column", or an .mtx, as above. A
// first line "user" or "row" and "item", "movie", "film" or "column", perhaps with "id" behind it,
// in letters of any size, is a heading.
std::vector<std::pair<std::string, std::string>> read_pairs(const std::string& path);

// Moves every cell whose hash says so, about this share of them, to the second list. The same seed
// chooses the same cells.
std::vector<Cell> take_held_out(Cells& cells, double share, uint64_t seed);

}  // namespace phub::examples
