// The outcome of a factorisation, and its file: a line "mean M", then lines "row NAME numbers" and
// "column NAME numbers", with spaces between them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace phub::examples {

struct FactorModel {
  double mean = 0;
  uint32_t width = 0;                       // numbers of a vector
  std::vector<std::string> rows, columns;   // names
  std::vector<double> of_rows, of_columns;  // their vectors, one after another
};

void write_model(const FactorModel& model, const std::string& path);
// Throws Error: kNotFound, there is no such file; kInvalid, with the line, it is no model.
FactorModel read_factor_model(const std::string& path);

struct Predictions {
  std::string lines;     // "row column prediction" of each pair
  uint64_t unknown = 0;  // pairs with a name that the model does not have: their prediction is the
                         // mean
};
Predictions predict(const FactorModel& model,
                    std::span<const std::pair<std::string, std::string>> pairs);

}  // namespace phub::examples
