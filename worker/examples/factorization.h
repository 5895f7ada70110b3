// The factorisation of a matrix of which some cells are known, with a store
// (../iterstore/store.h): value ≈ mean + x·y, of a vector for each row and one for each column.
//
// The sum that is minimised is Σ over the cells of (value − mean − x·y)² + λ(|x|² + |y|²). Rows are
// divided among all threads, which keep their vectors; those of columns are a table.
//   als  alternating least squares: a thread solves for its rows; what the columns' equations get
//        from them is added up in a second table; each column is then solved by one thread.
//   sgd  stochastic gradient descent, in `clocks` steps an iteration: between two clocks all
//   threads
//        together see a part of the cells.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "worker/examples/readers/cells.h"
#include "worker/iterstore/store.h"

namespace phub::examples {

struct FactorizationOptions {
  bool als = true;
  uint32_t width = 16;  // elements of a vector
  double lambda = 0.05;
  double rate = 0.1;         // sgd
  uint32_t clocks = 100;     // sgd, in an iteration
  uint32_t iterations = 20;  // at most
  uint64_t seed = 0;         // for the first vectors and the order of cells
};

// A thread's part: one of `parts` parts of the rows, of about as many cells.
class Factorization {
 public:
  // The columns' vectors; the errors of each iteration, as below; als: equations.
  static std::vector<iterstore::TableSpec> tables(const Cells& cells,
                                                  const FactorizationOptions& options);

  // REQUIRES: cells lives as long.
  Factorization(const Cells& cells, const FactorizationOptions& options, uint32_t part,
                uint32_t parts);

  // Once, before the first iteration: the columns' first vectors, which are small. Clocks.
  void begin(iterstore::StoreThread& store);
  // Clocks twice (als), or as often as the options say. In a virtual iteration it only accesses.
  // The sum of the known cells' squared errors, and their number, are added to row `iteration` of
  // the table of errors: als, after the rows were solved; sgd, before each cell's step.
  void iterate(iterstore::StoreThread& store, uint32_t iteration);
  // The vectors of this part's rows, one after another; the first of these rows; the mean of all
  // known cells.
  std::span<const double> row_vectors() const { return x_; }
  uint32_t first_row() const { return first_row_; }
  double mean() const { return mean_; }
  // Adds those of cells of this part's rows to the table's last row. `columns`: all vectors.
  // Clocks.
  void judge(iterstore::StoreThread& store, std::span<const Cell> cells,
             std::span<const double> columns) const;

 private:
  double solve_rows(iterstore::StoreThread& store);  // the squared errors
  void solve_columns(iterstore::StoreThread& store);
  double descend(iterstore::StoreThread& store, std::span<const uint32_t> cells);

  double error_of(const Cell& cell, std::span<const double> y) const;
  std::span<double> vector(uint32_t row) {
    return std::span(x_).subspan(size_t{row - first_row_} * options_.width, options_.width);
  }

  const FactorizationOptions options_;
  std::span<const Cell> cells_;  // the cells of this part
  uint32_t first_row_ = 0;
  double mean_ = 0;
  std::vector<uint32_t> columns_;  // ascending: those in cells_
  std::vector<uint32_t> owned_;    // ascending: that this part begins, and solves
  std::vector<uint32_t> count_;    // the number of cells in each column, in all parts
  std::vector<uint32_t> order_;    // the order of cells_, for sgd
  std::vector<double> x_;
  std::vector<double> added_;  // als: what the table of equations has from this part, by columns_
};

}  // namespace phub::examples
