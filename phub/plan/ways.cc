#include "phub/plan/ways.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "phub/plan/overlap.h"
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
  expect("--box-product-gflops", inputs.box_product_gflop_s);
  expect("a gradient's element", inputs.gradient_bytes);
  expect("a result's element", inputs.result_bytes);
}

// Less of nothing.
bool is_never_better(const WayCost& way, const WayCost& other) {
  return way.worker_out >= other.worker_out && way.worker_in >= other.worker_in &&
         way.box_in >= other.box_in && way.box_out >= other.box_out &&
         way.product_s >= other.product_s && way.box_product_s >= other.box_product_s;
}

// The ways of a matrix of which no other has less of everything.
std::vector<FactorWay> ways_of(const MatrixWays& matrix, const WayInputs& inputs) {
  std::vector<FactorWay> ways = {FactorWay::kWhole};
  if (matrix.box && !is_never_better(*matrix.box, matrix.whole)) ways.push_back(FactorWay::kBox);
  const bool never = is_never_better(matrix.ranks, matrix.whole) ||
                     (matrix.box && is_never_better(matrix.ranks, *matrix.box));
  if (inputs.to_ranks && !never) ways.push_back(FactorWay::kRanks);
  return ways;
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

  WayCost& of_key(uint32_t key) { return of_layer_[layer_[key]]; }
  const std::vector<WayCost>& of_layers() const { return of_layer_; }
  double seconds(const WayInputs& inputs) const {
    return layers_.empty() ? of_layer_.front().seconds(inputs)
                           : iteration_seconds(layers_, of_layer_, inputs, true);
  }

 private:
  std::span<const LayerComputing> layers_;
  std::vector<WayCost> of_layer_;
  std::vector<size_t> layer_;  // by key
};

// Tries all ways of every matrix that is left, in order.
class Search {
 public:
  // `others`: of all other keys.
  Search(const std::vector<MatrixWays*>& undecided, const WayInputs& inputs, const Costs& others)
      : undecided_(undecided), inputs_(inputs), so_far_(others) {
    for (const MatrixWays* matrix : undecided) ways_.push_back(ways_of(*matrix, inputs));
  }

  // The best way is that of each matrix afterwards.
  void run() {
    visit(0);
    for (size_t i = 0; i < undecided_.size(); ++i) undecided_[i]->way = best_[i];
  }

 private:
  void visit(size_t at) {
    const double seconds = so_far_.seconds(inputs_);
    if (seconds >= best_s_) return;  // more matrices take no less
    if (at == undecided_.size()) {
      best_s_ = seconds;
      best_.clear();
      for (const MatrixWays* matrix : undecided_) best_.push_back(matrix->way);
      return;
    }
    WayCost& cost = so_far_.of_key(undecided_[at]->key);
    const WayCost before = cost;
    for (const FactorWay way : ways_[at]) {
      undecided_[at]->way = way;
      cost += undecided_[at]->cost();
      visit(at + 1);
      cost = before;
    }
  }

  const std::vector<MatrixWays*>& undecided_;
  const WayInputs& inputs_;
  Costs so_far_;
  std::vector<std::vector<FactorWay>> ways_;
  double best_s_ = INFINITY;
  std::vector<FactorWay> best_;
};

std::string milliseconds(double seconds) { return fmt::format("{:.2f}", seconds * 1e3); }

}  // namespace

WayCost& WayCost::operator+=(const WayCost& other) {
  worker_out += other.worker_out;
  worker_in += other.worker_in;
  box_in += other.box_in;
  box_out += other.box_out;
  product_s += other.product_s;
  box_product_s += other.box_product_s;
  return *this;
}

double WayCost::seconds(const WayInputs& inputs) const {
  return std::max(link_seconds(std::max(worker_out, worker_in), inputs.worker_gbit_s),
                  link_seconds(std::max(box_in, box_out), inputs.box_gbit_s)) +
         product_s + box_product_s;
}

std::string_view name_of(FactorWay way) {
  constexpr std::string_view kNames[] = {"whole", "box", "ranks"};
  return kNames[static_cast<size_t>(way)];
}

WayCost whole_way(uint64_t elements, const WayInputs& inputs) {
  const double out = inputs.gradient_bytes * static_cast<double>(elements);
  const double in = inputs.result_bytes * static_cast<double>(elements);
  return {.worker_out = out,
          .worker_in = in,
          .box_in = out * inputs.ranks,
          .box_out = in * inputs.ranks};
}

std::optional<WayCost> box_way(uint64_t rows, uint64_t columns, const WayInputs& inputs) {
  KeySpec key{.elements = rows * columns, .shape = {rows, columns}};
  if (inputs.box_cores == 0 || inputs.samples > kMaxRankLimit || columns > kMaxTileColumns) {
    return std::nullopt;
  }
  key.rank_limit = static_cast<uint32_t>(inputs.samples);
  key.tile_rows = tile_rows_for(key, inputs.box_cores, 0);
  if (key.tile_rows == 0) return std::nullopt;
  const uint64_t chunks = (rows + key.tile_rows - 1) / key.tile_rows;
  // Each chunk has all of the right vectors, and the number of pairs.
  const double sent =
      kElementBytes * static_cast<double>(inputs.samples * (rows + chunks * columns) + chunks);
  const WayCost whole = whole_way(rows * columns, inputs);
  const double flops = 2 * inputs.ranks * static_cast<double>(inputs.samples) *
                       static_cast<double>(rows) * static_cast<double>(columns);
  // The core with the most chunks multiplies the longest.
  const uint64_t most = (chunks + inputs.box_cores - 1) / inputs.box_cores;
  const double share =
      std::min(1.0, static_cast<double>(most * key.tile_rows) / static_cast<double>(rows));
  return WayCost{.worker_out = sent,
                 .worker_in = whole.worker_in,
                 .box_in = sent * inputs.ranks,
                 .box_out = whole.box_out,
                 .box_product_s = flops * share / (inputs.box_product_gflop_s * 1e9)};
}

WayCost ranks_way(uint64_t rows, uint64_t columns, const WayInputs& inputs) {
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

Ways choose_ways(const JobSpec& spec, const WayInputs& inputs,
                 std::span<const LayerComputing> layers) {
  check(inputs);
  Ways ways;
  Costs all_whole(spec, layers), chosen(spec, layers);
  for (uint32_t k = 0; k < spec.keys.size(); ++k) {
    const KeySpec& key = spec.keys[k];
    const WayCost whole = whole_way(key.elements, inputs);
    ways.all_whole += whole;
    all_whole.of_key(k) += whole;
    if (key.shape.size() != 2) {
      ways.chosen += whole;
      chosen.of_key(k) += whole;
      continue;
    }
    const auto [rows, columns] = std::pair(key.shape[0], key.shape[1]);
    ways.matrices.push_back({.key = k,
                             .rows = rows,
                             .columns = columns,
                             .whole = whole,
                             .ranks = ranks_way(rows, columns, inputs),
                             .box = box_way(rows, columns, inputs)});
  }
  std::vector<MatrixWays*> undecided;
  for (MatrixWays& matrix : ways.matrices) {
    if (ways_of(matrix, inputs).size() > 1) undecided.push_back(&matrix);
  }
  const auto larger = [](const MatrixWays* a, const MatrixWays* b) {
    return a->rows * a->columns > b->rows * b->columns;
  };
  std::ranges::stable_sort(undecided, larger);
  undecided.resize(std::min(undecided.size(), kMostUndecided));
  Costs others = chosen;
  for (const MatrixWays& matrix : ways.matrices) {
    if (std::ranges::find(undecided, &matrix) == undecided.end()) {
      others.of_key(matrix.key) += matrix.whole;
    }
  }
  Search(undecided, inputs, others).run();
  for (const MatrixWays& matrix : ways.matrices) {
    ways.chosen += matrix.cost();
    chosen.of_key(matrix.key) += matrix.cost();
  }
  if (!layers.empty()) {
    ways.whole_of_layer = all_whole.of_layers();
    ways.chosen_of_layer = chosen.of_layers();
  }
  return ways;
}

namespace {

std::string describe_iterations(const Ways& ways, const WayInputs& inputs,
                                std::span<const LayerComputing> layers) {
  const double alone = computing_seconds(layers);
  TextTable table({"exchange", "ms", "iteration ms", "with overlap", "visible ms", "of ranks"},
                  true);
  const auto add = [&](const char* name, const WayCost& all, std::span<const WayCost> of_layer) {
    const double with = iteration_seconds(layers, of_layer, inputs, true);
    table.add({name, milliseconds(all.seconds(inputs)),
               milliseconds(iteration_seconds(layers, of_layer, inputs, false)), milliseconds(with),
               milliseconds(with - alone), fmt::format("{:.2f}", inputs.ranks * alone / with)});
  };
  add("all whole", ways.all_whole, ways.whole_of_layer);
  add("as chosen", ways.chosen, ways.chosen_of_layer);
  return fmt::format("What computing hides ({} layers, {} ms of an iteration)\n", layers.size(),
                     milliseconds(alone)) +
         table.text();
}

}  // namespace

std::string describe(const Ways& ways, const JobSpec& spec, const WayInputs& inputs,
                     std::span<const LayerComputing> layers) {
  TextTable table({"matrix", "rows", "columns", "whole ms", "box ms", "of which products",
                   "ranks ms", "of which products", "way", "key"},
                  true);
  size_t as_factors = 0;
  for (const MatrixWays& matrix : ways.matrices) {
    as_factors += matrix.way != FactorWay::kWhole ? 1 : 0;
    const auto& box = matrix.box;
    table.add({fmt::to_string(matrix.key), fmt::to_string(matrix.rows),
               fmt::to_string(matrix.columns), milliseconds(matrix.whole.seconds(inputs)),
               box ? milliseconds(box->seconds(inputs)) : "-",
               box ? milliseconds(box->box_product_s) : "-",
               inputs.to_ranks ? milliseconds(matrix.ranks.seconds(inputs)) : "-",
               inputs.to_ranks ? milliseconds(matrix.ranks.product_s) : "-",
               std::string(name_of(matrix.way)), spec.keys[matrix.key].name});
  }
  return fmt::format(
             "Ways of matrices (ranks: {}; samples of each: {}; links of a rank {:g} Gbit/s, of "
             "the box {:g}; products of a rank {:g} GFLOP/s, of {} cores of the box {:g} each)\n",
             inputs.ranks, inputs.samples, inputs.worker_gbit_s, inputs.box_gbit_s,
             inputs.product_gflop_s, inputs.box_cores, inputs.box_product_gflop_s) +
         table.text() +
         fmt::format("All keys: {} ms whole, {} ms with {} of {} matrices as factors\n",
                     milliseconds(ways.all_whole.seconds(inputs)),
                     milliseconds(ways.chosen.seconds(inputs)), as_factors, ways.matrices.size()) +
         (layers.empty() ? "" : describe_iterations(ways, inputs, layers));
}

}  // namespace phub
