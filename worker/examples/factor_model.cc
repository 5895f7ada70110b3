#include "worker/examples/factor_model.h"

#include <fmt/format.h>

#include <cmath>
#include <numeric>
#include <string_view>

#include "worker/examples/files.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

std::string lines_of(const char* kind, std::span<const std::string> names,
                     std::span<const double> vectors, uint32_t width) {
  std::string lines;
  for (size_t n = 0; n < names.size(); ++n) {
    lines += fmt::format("{} {}", kind, names[n]);
    for (const double each : vectors.subspan(n * width, width)) lines += fmt::format(" {}", each);
    lines += '\n';
  }
  return lines;
}

double finite_in(std::string_view word, const Lines& lines) {
  const std::optional<double> number = number_in(word);
  if (number && std::isfinite(*number)) return *number;
  lines.refuse("'{}' is not a finite number: is this a file that mf --out wrote?", shown(word));
}

}  // namespace

void write_model(const FactorModel& model, const std::string& path) {
  if (path.empty()) return;
  write_file(path, fmt::format("mean {}\n", model.mean) +
                       lines_of("row", model.rows, model.of_rows, model.width) +
                       lines_of("column", model.columns, model.of_columns, model.width));
}

FactorModel read_factor_model(const std::string& path) {
  Lines lines(path);
  FactorModel model;
  Names rows(model.rows), columns(model.columns);
  std::string_view rest = lines.next().value_or("");
  if (next_word(rest) != "mean") {
    lines.refuse("a model begins with 'mean': is this a file that mf --out wrote?");
  }
  model.mean = finite_in(next_word(rest), lines);
  while (const auto line = lines.next()) {
    rest = *line;
    const std::string_view kind = next_word(rest), name = next_word(rest);
    if ((kind != "row" && kind != "column") || name.empty()) {
      lines.refuse("'{}' is not a row or a column: is this a file that mf --out wrote?",
                   shown(*line));
    }
    auto& names = kind == "row" ? rows : columns;
    auto& vectors = kind == "row" ? model.of_rows : model.of_columns;
    if (names.find(name) != nullptr) lines.refuse("{} '{}' comes twice", kind, shown(name));
    names.of(name, lines);
    uint32_t width = 0;
    for (std::string_view word; !(word = next_word(rest)).empty(); ++width) {
      vectors.push_back(finite_in(word, lines));
    }
    if (model.width == 0) model.width = width;
    if (width == 0 || width != model.width) {
      lines.refuse("it has {} numbers, and the lines before have {}", width, model.width);
    }
  }
  if (model.rows.empty() || model.columns.empty()) {
    fail(ErrorCode::kInvalid, "{} has no rows or no columns: was it cut off?", path);
  }
  return model;
}

Predictions predict(const FactorModel& model,
                    std::span<const std::pair<std::string, std::string>> pairs) {
  std::vector<std::string> row_names = model.rows, column_names = model.columns;
  const Names rows(row_names), columns(column_names);
  Predictions predictions;
  for (const auto& [row, column] : pairs) {
    const uint32_t *x = rows.find(row), *y = columns.find(column);
    double value = model.mean;
    if (x != nullptr && y != nullptr) {
      const auto at = model.of_rows.begin() + static_cast<ptrdiff_t>(size_t{*x} * model.width);
      value += std::inner_product(
          at, at + model.width,
          model.of_columns.begin() + static_cast<ptrdiff_t>(size_t{*y} * model.width), 0.0);
    } else {
      ++predictions.unknown;
    }
    predictions.lines += fmt::format("{} {} {}\n", row, column, value);
  }
  return predictions;
}

}  // namespace phub::examples
