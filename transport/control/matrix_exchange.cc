#include "transport/control/matrix_exchange.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "transport/control/layer_computing.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr double kElementBytes = sizeof(float);

double link_seconds(double bytes, double gbit_s) { return bytes * 8 / (gbit_s * 1e9); }

void check(const ExchangeInputs& inputs) {
  const auto expect = [](std::string_view what, double value) {
    if (value > 0 && std::isfinite(value)) return;
    fail(ErrorCode::kInvalid, "{} is {}; it must be a positive number", what, value);
  };
  expect("the number of ranks", inputs.ranks);
  if (inputs.samples_of.empty()) expect("--samples", static_cast<double>(inputs.samples));
  expect("--worker-link-gbps", inputs.worker_gbit_s);
  expect("--link-gbps of all NICs", inputs.box_gbit_s);
  expect("--product-gflops", inputs.product_gflop_s);
  expect("--box-product-gflops", inputs.box_product_gflop_s);
  expect("a gradient's element", inputs.gradient_bytes);
  expect("a result's element", inputs.result_bytes);
}

// Less of nothing.
bool is_never_better(const ExchangeCost& one, const ExchangeCost& other) {
  return one.worker_out >= other.worker_out && one.worker_in >= other.worker_in &&
         one.box_in >= other.box_in && one.box_out >= other.box_out &&
         one.product_s >= other.product_s && one.box_product_s >= other.box_product_s;
}

// The ways of a matrix of which no other has less of everything.
std::vector<MatrixExchange> exchanges_of(const MatrixCosts& matrix, const ExchangeInputs& inputs) {
  std::vector<MatrixExchange> exchanges = {MatrixExchange::kWhole};
  if (matrix.box && !is_never_better(*matrix.box, matrix.whole))
    exchanges.push_back(MatrixExchange::kBox);
  const bool never = is_never_better(matrix.ranks, matrix.whole) ||
                     (matrix.box && is_never_better(matrix.ranks, *matrix.box));
  if (inputs.to_ranks && !never) exchanges.push_back(MatrixExchange::kRanks);
  return exchanges;
}

// What keys cost: all together, or each layer's.
class Costs {
 public:
  Costs(const JobSpec& spec, std::span<const LayerComputing> layers) : layers_(layers) {
    of_layer_.resize(std::max<size_t>(layers.size(), 1));
    layer_.resize(spec.keys.size());
    for (size_t l = 0; l < layers.size(); ++l) {
      for (const uint32_t key : layers[l].keys) layer_[key] = l;
    }
  }

  ExchangeCost& of_key(uint32_t key) { return of_layer_[layer_[key]]; }
  const std::vector<ExchangeCost>& of_layers() const { return of_layer_; }
  double seconds(const ExchangeInputs& inputs) const {
    return layers_.empty() ? of_layer_.front().seconds(inputs)
                           : iteration_seconds(layers_, of_layer_, inputs, true);
  }

 private:
  std::span<const LayerComputing> layers_;
  std::vector<ExchangeCost> of_layer_;
  std::vector<size_t> layer_;  // by key
};

// Tries all ways of every matrix that is left, in order.
class Search {
 public:
  // `others`: of all other keys.
  Search(const std::vector<MatrixCosts*>& undecided, const ExchangeInputs& inputs,
         const Costs& others)
      : undecided_(undecided), inputs_(inputs), so_far_(others) {
    for (const MatrixCosts* matrix : undecided) exchanges_.push_back(exchanges_of(*matrix, inputs));
  }

  // The best way is that of each matrix afterwards; all whole, if no time is finite.
  void run() {
    best_.assign(undecided_.size(), MatrixExchange::kWhole);
    visit(0);
    for (size_t i = 0; i < undecided_.size(); ++i) undecided_[i]->exchange = best_[i];
  }

 private:
  void visit(size_t at) {
    const double seconds = so_far_.seconds(inputs_);
    if (seconds >= best_s_) return;  // more matrices take no less
    if (at == undecided_.size()) {
      best_s_ = seconds;
      best_.clear();
      for (const MatrixCosts* matrix : undecided_) best_.push_back(matrix->exchange);
      return;
    }
    ExchangeCost& cost = so_far_.of_key(undecided_[at]->key);
    const ExchangeCost before = cost;
    for (const MatrixExchange exchange : exchanges_[at]) {
      undecided_[at]->exchange = exchange;
      cost += undecided_[at]->cost();
      visit(at + 1);
      cost = before;
    }
  }

  const std::vector<MatrixCosts*>& undecided_;
  const ExchangeInputs& inputs_;
  Costs so_far_;
  std::vector<std::vector<MatrixExchange>> exchanges_;
  double best_s_ = INFINITY;
  std::vector<MatrixExchange> best_;
};

constexpr double kLess = 1 - 1e-9;  // a shorter time is shorter by more than roundings

ExchangeCost operator-(const ExchangeCost& all, const ExchangeCost& one) {
  return {.worker_out = all.worker_out - one.worker_out,
          .worker_in = all.worker_in - one.worker_in,
          .box_in = all.box_in - one.box_in,
          .box_out = all.box_out - one.box_out,
          .product_s = all.product_s - one.product_s,
          .box_product_s = all.box_product_s - one.box_product_s};
}

// Gives matrix after matrix its best way beside those of the others, until none changes.
double improve(const std::vector<MatrixCosts*>& undecided, const ExchangeInputs& inputs,
               const Costs& others) {
  constexpr int kPasses = 100;  // two or three are enough
  double best = INFINITY;
  bool changed = true;
  for (int pass = 0; changed && pass < kPasses; ++pass) {
    changed = false;
    Costs all = others;
    for (const MatrixCosts* matrix : undecided) all.of_key(matrix->key) += matrix->cost();
    best = all.seconds(inputs);
    for (MatrixCosts* const matrix : undecided) {
      ExchangeCost& cost = all.of_key(matrix->key);
      const MatrixExchange before = matrix->exchange;
      MatrixExchange to = before;
      const ExchangeCost without = cost - matrix->cost();
      for (const MatrixExchange exchange : exchanges_of(*matrix, inputs)) {
        matrix->exchange = exchange;
        cost = without;
        cost += matrix->cost();
        const double seconds = all.seconds(inputs);
        if (!(seconds < best * kLess)) continue;  // nor if it is no number
        best = seconds;
        to = exchange;
      }
      matrix->exchange = to;
      cost = without;
      cost += matrix->cost();
      changed = changed || to != before;
    }
  }
  return best;
}

// Of more than the search can try: begins with its choice for the largest and all others whole, and
// with all as factors, and improves both.
void decide_many(const std::vector<MatrixCosts*>& undecided, const ExchangeInputs& inputs,
                 const Costs& others) {
  const double from_search = improve(undecided, inputs, others);
  std::vector<MatrixExchange> found;
  for (const MatrixCosts* matrix : undecided) found.push_back(matrix->exchange);
  for (MatrixCosts* const matrix : undecided)
    matrix->exchange = exchanges_of(*matrix, inputs).back();
  if (improve(undecided, inputs, others) < from_search) return;
  for (size_t i = 0; i < undecided.size(); ++i) undecided[i]->exchange = found[i];
}

ExchangeInputs of_key(const ExchangeInputs& inputs, uint32_t key) {
  ExchangeInputs of = inputs;
  if (!inputs.samples_of.empty()) of.samples = inputs.samples_of[key];
  return of;
}

}  // namespace

ExchangeCost& ExchangeCost::operator+=(const ExchangeCost& other) {
  worker_out += other.worker_out;
  worker_in += other.worker_in;
  box_in += other.box_in;
  box_out += other.box_out;
  product_s += other.product_s;
  box_product_s += other.box_product_s;
  return *this;
}

double ExchangeCost::seconds(const ExchangeInputs& inputs) const {
  return std::max(link_seconds(std::max(worker_out, worker_in), inputs.worker_gbit_s),
                  link_seconds(std::max(box_in, box_out), inputs.box_gbit_s)) +
         product_s + box_product_s;
}

std::string_view name_of(MatrixExchange exchange) {
  constexpr std::string_view kNames[] = {"whole", "box", "ranks"};
  return kNames[static_cast<size_t>(exchange)];
}

ExchangeCost whole_cost(uint64_t elements, const ExchangeInputs& inputs) {
  const double out = inputs.gradient_bytes * static_cast<double>(elements);
  const double in = inputs.result_bytes * static_cast<double>(elements);
  return {.worker_out = out,
          .worker_in = in,
          .box_in = out * inputs.ranks,
          .box_out = in * inputs.ranks};
}

std::optional<ExchangeCost> box_cost(uint64_t rows, uint64_t columns,
                                     const ExchangeInputs& inputs) {
  KeySpec key{.elements = rows * columns, .shape = {rows, columns}};
  if (inputs.box_cores == 0 || inputs.samples > kMaxRankLimit || columns > kMaxTileColumns) {
    return std::nullopt;
  }
  if (inputs.or_rows && rows > kMaxRowsLimit) return std::nullopt;
  key.rank_limit = static_cast<uint32_t>(inputs.samples);
  if (inputs.or_rows) key.rows_limit = static_cast<uint32_t>(rows);
  key.tile_rows = tile_rows_for(key, inputs.box_cores, 0);
  if (key.tile_rows == 0) return std::nullopt;
  const uint64_t chunks = (rows + key.tile_rows - 1) / key.tile_rows;
  // Each chunk has all of the right vectors, and the number of pairs.
  const double sent =
      kElementBytes * static_cast<double>(inputs.samples * (rows + chunks * columns) + chunks);
  const ExchangeCost whole = whole_cost(rows * columns, inputs);
  const double flops = 2 * inputs.ranks * static_cast<double>(inputs.samples) *
                       static_cast<double>(rows) * static_cast<double>(columns);
  // The core with the most chunks multiplies the longest.
  const uint64_t most = (chunks + inputs.box_cores - 1) / inputs.box_cores;
  const double share =
      std::min(1.0, static_cast<double>(most * key.tile_rows) / static_cast<double>(rows));
  return ExchangeCost{.worker_out = sent,
                      .worker_in = whole.worker_in,
                      .box_in = sent * inputs.ranks,
                      .box_out = whole.box_out,
                      .box_product_s = flops * share / (inputs.box_product_gflop_s * 1e9)};
}

ExchangeCost ranks_cost(uint64_t rows, uint64_t columns, const ExchangeInputs& inputs) {
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

Exchanges choose_exchanges(const JobSpec& spec, const ExchangeInputs& inputs,
                           std::span<const LayerComputing> layers) {
  check(inputs);
  PHUB_CHECK(inputs.samples_of.empty() || inputs.samples_of.size() == spec.keys.size());
  Exchanges exchanges;
  Costs all_whole(spec, layers), chosen(spec, layers);
  for (uint32_t k = 0; k < spec.keys.size(); ++k) {
    const KeySpec& key = spec.keys[k];
    const ExchangeCost whole = whole_cost(key.elements, inputs);
    exchanges.all_whole += whole;
    all_whole.of_key(k) += whole;
    const ExchangeInputs of = of_key(inputs, k);
    if (key.shape.size() != 2 || of.samples == 0) {
      exchanges.chosen += whole;
      chosen.of_key(k) += whole;
      continue;
    }
    const auto [rows, columns] = std::pair(key.shape[0], key.shape[1]);
    exchanges.matrices.push_back({.key = k,
                                  .rows = rows,
                                  .columns = columns,
                                  .whole = whole,
                                  .ranks = ranks_cost(rows, columns, of),
                                  .box = box_cost(rows, columns, of)});
  }
  std::vector<MatrixCosts*> undecided;
  for (MatrixCosts& matrix : exchanges.matrices) {
    if (exchanges_of(matrix, inputs).size() > 1) undecided.push_back(&matrix);
  }
  const auto larger = [](const MatrixCosts* a, const MatrixCosts* b) {
    return a->rows * a->columns > b->rows * b->columns;
  };
  std::ranges::stable_sort(undecided, larger);
  const std::vector<MatrixCosts*> all_undecided = undecided;
  undecided.resize(std::min(undecided.size(), kMostUndecided));
  Costs decided = chosen, others = chosen;
  for (const MatrixCosts& matrix : exchanges.matrices) {
    if (std::ranges::find(undecided, &matrix) != undecided.end()) continue;
    others.of_key(matrix.key) += matrix.whole;
    if (std::ranges::find(all_undecided, &matrix) == all_undecided.end()) {
      decided.of_key(matrix.key) += matrix.whole;
    }
  }
  Search(undecided, inputs, others).run();
  if (all_undecided.size() > undecided.size()) decide_many(all_undecided, inputs, decided);
  for (const MatrixCosts& matrix : exchanges.matrices) {
    exchanges.chosen += matrix.cost();
    chosen.of_key(matrix.key) += matrix.cost();
  }
  if (!layers.empty()) {
    exchanges.whole_of_layer = all_whole.of_layers();
    exchanges.chosen_of_layer = chosen.of_layers();
  }
  return exchanges;
}

}  // namespace phub
