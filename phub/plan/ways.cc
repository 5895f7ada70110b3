#include "phub/plan/ways.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "phub/text_table.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr double kElementBytes = sizeof(float);

double link_seconds(double bytes, double gbit_s) { return bytes * 8 / (gbit_s * 1e9); }

void check(const WayInputs& inputs) {
  const auto expect = [](std::string_view what, double value) {
    if (value > 0 && std::isfinite(value)) return;
    fail(ErrorCode::kInvalid, "{} is {}; it must be a positive number", what, value);
  };
  expect("the number of ranks", inputs.ranks);
  expect("--samples", static_cast<double>(inputs.samples));
  expect("--worker-link-gbps", inputs.worker_gbit_s);
  expect("--link-gbps of all NICs", inputs.box_gbit_s);
  expect("--product-gflops", inputs.product_gflop_s);
}

// Less of nothing.
bool is_never_better(const WayCost& way, const WayCost& other) {
  return way.worker_out >= other.worker_out && way.worker_in >= other.worker_in &&
         way.box_in >= other.box_in && way.box_out >= other.box_out &&
         way.product_s >= other.product_s;
}

// Tries both ways for every matrix that is left, in order.
class Search {
 public:
  Search(std::vector<MatrixWays*> undecided, const WayInputs& inputs)
      : undecided_(std::move(undecided)), inputs_(inputs) {}

  // `begin`: of all other keys.
  void run(const WayCost& begin) { visit(0, 0, begin); }
  bool as_factors(size_t i) const { return (best_ >> i & 1) != 0; }

 private:
  void visit(size_t at, uint32_t factors, const WayCost& so_far) {
    const double seconds = so_far.seconds(inputs_);
    if (seconds >= best_s_) return;  // more matrices take no less
    if (at == undecided_.size()) {
      best_s_ = seconds;
      best_ = factors;
      return;
    }
    WayCost whole = so_far, as_factors = so_far;
    whole += undecided_[at]->whole;
    as_factors += undecided_[at]->factors;
    visit(at + 1, factors, whole);
    visit(at + 1, factors | uint32_t{1} << at, as_factors);
  }

  const std::vector<MatrixWays*> undecided_;
  const WayInputs& inputs_;
  double best_s_ = INFINITY;
  uint32_t best_ = 0;
};
static_assert(kMostUndecided < 32);

std::string milliseconds(double seconds) { return fmt::format("{:.2f}", seconds * 1e3); }

}  // namespace

WayCost& WayCost::operator+=(const WayCost& other) {
  worker_out += other.worker_out;
  worker_in += other.worker_in;
  box_in += other.box_in;
  box_out += other.box_out;
  product_s += other.product_s;
  return *this;
}

double WayCost::seconds(const WayInputs& inputs) const {
  return std::max(link_seconds(std::max(worker_out, worker_in), inputs.worker_gbit_s),
                  link_seconds(std::max(box_in, box_out), inputs.box_gbit_s)) +
         product_s;
}

WayCost whole_way(uint64_t elements, const WayInputs& inputs) {
  const double bytes = kElementBytes * static_cast<double>(elements);
  const double of_all = bytes * inputs.ranks;
  return {.worker_out = bytes, .worker_in = bytes, .box_in = of_all, .box_out = of_all};
}

WayCost factors_way(uint64_t rows, uint64_t columns, const WayInputs& inputs) {
  const auto samples = static_cast<double>(inputs.samples);
  const double bytes = kElementBytes * samples * static_cast<double>(rows + columns);
  const double of_all = bytes * inputs.ranks;
  const double flops =
      2 * inputs.ranks * samples * static_cast<double>(rows) * static_cast<double>(columns);
  return {.worker_out = bytes,
          .worker_in = of_all,
          .box_in = of_all,
          .box_out = of_all * inputs.ranks,
          .product_s = flops / (inputs.product_gflop_s * 1e9)};
}

Ways choose_ways(const JobSpec& spec, const WayInputs& inputs) {
  check(inputs);
  Ways ways;
  for (uint32_t k = 0; k < spec.keys.size(); ++k) {
    const KeySpec& key = spec.keys[k];
    const WayCost whole = whole_way(key.elements, inputs);
    ways.all_whole += whole;
    if (key.shape.size() != 2) {
      ways.chosen += whole;
      continue;
    }
    const auto [rows, columns] = std::pair(key.shape[0], key.shape[1]);
    ways.matrices.push_back({.key = k,
                             .rows = rows,
                             .columns = columns,
                             .whole = whole,
                             .factors = factors_way(rows, columns, inputs)});
  }
  std::vector<MatrixWays*> undecided;
  for (MatrixWays& matrix : ways.matrices) {
    if (!is_never_better(matrix.factors, matrix.whole)) undecided.push_back(&matrix);
  }
  const auto larger = [](const MatrixWays* a, const MatrixWays* b) {
    return a->rows * a->columns > b->rows * b->columns;
  };
  std::ranges::stable_sort(undecided, larger);
  undecided.resize(std::min(undecided.size(), kMostUndecided));
  WayCost others = ways.chosen;
  for (const MatrixWays& matrix : ways.matrices) {
    if (std::ranges::find(undecided, &matrix) == undecided.end()) others += matrix.whole;
  }
  Search search(undecided, inputs);
  search.run(others);
  for (size_t i = 0; i < undecided.size(); ++i) undecided[i]->as_factors = search.as_factors(i);
  for (const MatrixWays& matrix : ways.matrices) {
    ways.chosen += matrix.as_factors ? matrix.factors : matrix.whole;
  }
  return ways;
}

std::string describe(const Ways& ways, const JobSpec& spec, const WayInputs& inputs) {
  TextTable table(
      {"matrix", "rows", "columns", "whole ms", "factors ms", "of it products", "way", "key"},
      true);
  size_t as_factors = 0;
  for (const MatrixWays& matrix : ways.matrices) {
    as_factors += matrix.as_factors ? 1 : 0;
    table.add({fmt::to_string(matrix.key), fmt::to_string(matrix.rows),
               fmt::to_string(matrix.columns), milliseconds(matrix.whole.seconds(inputs)),
               milliseconds(matrix.factors.seconds(inputs)), milliseconds(matrix.factors.product_s),
               matrix.as_factors ? "factors" : "whole", spec.keys[matrix.key].name});
  }
  return fmt::format(
             "Ways of matrices (ranks: {}; samples of each: {}; links of a rank {:g} Gbit/s, of "
             "the "
             "box {:g}; products {:g} GFLOP/s)\n",
             inputs.ranks, inputs.samples, inputs.worker_gbit_s, inputs.box_gbit_s,
             inputs.product_gflop_s) +
         table.text() +
         fmt::format("All keys: {} ms whole, {} ms with {} of {} matrices as factors\n",
                     milliseconds(ways.all_whole.seconds(inputs)),
                     milliseconds(ways.chosen.seconds(inputs)), as_factors, ways.matrices.size());
}

}  // namespace phub
