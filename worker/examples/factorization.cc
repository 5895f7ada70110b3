#include "worker/examples/factorization.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

namespace phub::examples {
namespace {

constexpr uint32_t kVectors = 0, kErrors = 1, kEquations = 2;  // tables

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;

uint32_t equation_values(uint32_t width) { return width * (width + 1) / 2 + width; }

// The lower half of Σ v vᵀ, then Σ value v, as an equation's row of the table has them.
void add_to_equation(std::span<double> sums, std::span<const double> v, double value) {
  size_t at = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    for (size_t j = 0; j <= i; ++j) sums[at++] += v[i] * v[j];
  }
  for (const double each : v) sums[at++] += value * each;
}

// (Σ v vᵀ + λ count) result = Σ value v
void solve(std::span<const double> sums, double ridge, std::span<double> result) {
  const auto width = static_cast<Eigen::Index>(result.size());
  Matrix left(width, width);
  size_t at = 0;
  for (Eigen::Index i = 0; i < width; ++i) {
    for (Eigen::Index j = 0; j <= i; ++j) left(i, j) = left(j, i) = sums[at++];
  }
  left.diagonal().array() += ridge;
  const Vector right = Eigen::Map<const Vector>(&sums[at], width);
  Eigen::Map<Vector>(result.data(), width) = left.ldlt().solve(right);
}

double product(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

}  // namespace

std::vector<iterstore::TableSpec> Factorization::tables(const Cells& cells,
                                                        const FactorizationOptions& options) {
  std::vector<iterstore::TableSpec> tables{{.name = "columns",
                                            .rows = cells.columns.size(),
                                            .columns = options.width,
                                            .type = "f64",
                                            .operation = "add",
                                            .fixed = true}};
  tables.push_back({.name = "errors",
                    .rows = uint64_t{options.iterations} + 1,
                    .columns = 2,
                    .type = "f64",
                    .operation = "add"});
  if (!options.als) return tables;
  tables.push_back(tables.front());
  tables.back().name = "equations";
  tables.back().columns = equation_values(options.width);
  return tables;
}

Factorization::Factorization(const Cells& cells, const FactorizationOptions& options, uint32_t part,
                             uint32_t parts)
    : options_(options) {
  const std::vector<Cell>& all = cells.cells;
  for (const Cell& cell : all) mean_ += cell.value / static_cast<double>(all.size());
  // Rows are not cut: a part begins with the row in which its share of the cells does.
  const auto begin_of = [&](uint32_t which) {
    if (which == parts) return all.size();
    const size_t at = all.size() * which / parts;
    return static_cast<size_t>(std::ranges::lower_bound(all, all[at].row, {}, &Cell::row) -
                               all.begin());
  };
  const size_t first = begin_of(part), last = begin_of(part + 1);
  cells_ = std::span(all).subspan(first, last - first);
  const auto row_at = [&](size_t at) {
    return at == 0 ? 0 : at == all.size() ? static_cast<uint32_t>(cells.rows.size()) : all[at].row;
  };
  first_row_ = row_at(first);
  count_.resize(cells.columns.size());
  std::vector<uint32_t> owner(cells.columns.size(), parts);
  for (uint32_t p = parts; p-- > 0;) {
    for (size_t at = begin_of(p); at < begin_of(p + 1); ++at) {
      owner[all[at].column] = p;
      ++count_[all[at].column];
      if (p == part) columns_.push_back(all[at].column);
    }
  }
  std::ranges::sort(columns_);
  columns_.erase(std::unique(columns_.begin(), columns_.end()), columns_.end());
  for (uint32_t column = 0; column < owner.size(); ++column) {
    if (owner[column] == part) owned_.push_back(column);
  }
  x_.resize(size_t{row_at(last) - first_row_} * options.width);
  if (options.als) added_.resize(columns_.size() * equation_values(options.width));
  if (options.als) return;
  std::mt19937_64 draw(options.seed ^ part);
  order_.resize(cells_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::shuffle(order_, draw);
  std::normal_distribution<double> small(0, 0.1);
  for (double& each : x_) each = small(draw);
}

void Factorization::begin(iterstore::StoreThread& store) {
  std::normal_distribution<double> small(0, 0.1);
  std::vector<double> y(options_.width);
  for (const uint32_t column : owned_) {
    std::mt19937_64 draw(options_.seed << 32 ^ column);
    for (double& each : y) each = small(draw);
    store.update<double>(kVectors, column, y);
  }
  store.clock();
}

void Factorization::iterate(iterstore::StoreThread& store, uint32_t iteration) {
  double squares = 0;
  const auto add_error = [&] {
    const double found[] = {squares, static_cast<double>(cells_.size())};
    store.update<double>(kErrors, iteration, found);
  };
  if (options_.als) {
    squares = solve_rows(store);
    add_error();
    store.clock();
    solve_columns(store);
    return store.clock();
  }
  for (size_t c = 0; c < options_.clocks; ++c) {
    const size_t first = order_.size() * c / options_.clocks;
    const size_t last = order_.size() * (c + 1) / options_.clocks;
    squares += descend(store, std::span(order_).subspan(first, last - first));
    if (c + 1 == options_.clocks) add_error();
    store.clock();
  }
}

double Factorization::error_of(const Cell& cell, std::span<const double> y) const {
  const size_t at = size_t{cell.row - first_row_} * options_.width;
  return cell.value - mean_ - product(std::span(x_).subspan(at, options_.width), y);
}

void Factorization::judge(iterstore::StoreThread& store, std::span<const Cell> cells,
                          std::span<const double> columns) const {
  const uint32_t width = options_.width;
  const size_t rows = x_.size() / width;
  double found[2] = {};  // squares, cells
  for (const Cell& cell : cells) {
    if (cell.row < first_row_ || cell.row - first_row_ >= rows) continue;
    const double error = error_of(cell, columns.subspan(size_t{cell.column} * width, width));
    found[0] += error * error;
    found[1] += 1;
  }
  store.update<double>(kErrors, options_.iterations, found);
  store.clock();
}

double Factorization::solve_rows(iterstore::StoreThread& store) {
  const uint32_t width = options_.width, values = equation_values(width);
  std::vector<double> y(columns_.size() * width), sums(values), now(added_.size());
  std::vector<uint64_t> rows(columns_.begin(), columns_.end());
  store.read_batch<double>(kVectors, rows, y);
  const auto at_of = [&](uint32_t column) {
    return static_cast<size_t>(std::ranges::lower_bound(columns_, column) - columns_.begin());
  };
  double squares = 0;
  for (size_t first = 0, last = 0; first < cells_.size() && !store.is_virtual(); first = last) {
    const uint32_t row = cells_[first].row;
    std::ranges::fill(sums, 0.0);
    for (; last < cells_.size() && cells_[last].row == row; ++last) {
      add_to_equation(sums, std::span(y).subspan(at_of(cells_[last].column) * width, width),
                      cells_[last].value - mean_);
    }
    solve(sums, options_.lambda * static_cast<double>(last - first), vector(row));
    for (size_t at = first; at < last; ++at) {
      const double error =
          error_of(cells_[at], std::span(y).subspan(at_of(cells_[at].column) * width, width));
      squares += error * error;
      add_to_equation(std::span(now).subspan(at_of(cells_[at].column) * values, values),
                      vector(row), cells_[at].value - mean_);
    }
  }
  // The table has what this part added the last time.
  std::vector<double> by(now.size());
  std::ranges::transform(now, added_, by.begin(), std::minus<>());
  store.update_batch<double>(kEquations, rows, by);
  if (!store.is_virtual()) added_ = std::move(now);
  return squares;
}

void Factorization::solve_columns(iterstore::StoreThread& store) {
  const uint32_t width = options_.width, values = equation_values(width);
  std::vector<double> sums(owned_.size() * values), y(owned_.size() * width), solved(width);
  const std::vector<uint64_t> rows(owned_.begin(), owned_.end());
  store.read_batch<double>(kEquations, rows, sums);
  store.read_batch<double>(kVectors, rows, y);
  for (size_t i = 0; i < owned_.size() && !store.is_virtual(); ++i) {
    solve(std::span(sums).subspan(i * values, values), options_.lambda * count_[owned_[i]], solved);
    for (uint32_t k = 0; k < width; ++k) y[i * width + k] = solved[k] - y[i * width + k];
  }
  store.update_batch<double>(kVectors, rows, y);
}

double Factorization::descend(iterstore::StoreThread& store, std::span<const uint32_t> cells) {
  std::vector<double> y(options_.width), by(options_.width);
  double squares = 0;
  for (const uint32_t at : cells) {
    const Cell& cell = cells_[at];
    store.read<double>(kVectors, cell.column, y);
    if (!store.is_virtual()) {
      const std::span<double> x = vector(cell.row);
      const double error = error_of(cell, y);
      squares += error * error;
      for (size_t k = 0; k < x.size(); ++k) {
        by[k] = options_.rate * (error * x[k] - options_.lambda * y[k]);
        x[k] += options_.rate * (error * y[k] - options_.lambda * x[k]);
      }
    }
    store.update<double>(kVectors, cell.column, by);
  }
  return squares;
}

}  // namespace phub::examples
