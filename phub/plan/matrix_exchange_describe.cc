#include "phub/plan/matrix_exchange_describe.h"

#include <fmt/format.h>

#include "phub/text_table.h"

namespace phub {
namespace {

std::string milliseconds(double seconds) { return fmt::format("{:.2f}", seconds * 1e3); }

std::string describe_iterations(const Exchanges& exchanges, const ExchangeInputs& inputs,
                                std::span<const LayerComputing> layers) {
  const double alone = computing_seconds(layers);
  TextTable table({"exchange", "ms", "iteration ms", "with overlap", "visible ms", "of ranks"},
                  true);
  const auto add = [&](const char* name, const ExchangeCost& all,
                       std::span<const ExchangeCost> of_layer) {
    const double with = iteration_seconds(layers, of_layer, inputs, true);
    table.add({name, milliseconds(all.seconds(inputs)),
               milliseconds(iteration_seconds(layers, of_layer, inputs, false)), milliseconds(with),
               milliseconds(with - alone), fmt::format("{:.2f}", inputs.ranks * alone / with)});
  };
  add("all whole", exchanges.all_whole, exchanges.whole_of_layer);
  add("as chosen", exchanges.chosen, exchanges.chosen_of_layer);
  return fmt::format("What computing hides ({} layers, {} ms of an iteration)\n", layers.size(),
                     milliseconds(alone)) +
         table.text();
}

}  // namespace

std::string describe(const Exchanges& exchanges, const JobSpec& spec, const ExchangeInputs& inputs,
                     std::span<const LayerComputing> layers) {
  TextTable table({"matrix", "rows", "columns", "whole ms", "box ms", "of which products",
                   "ranks ms", "of which products", "way", "key"},
                  true);
  size_t as_factors = 0;
  for (const MatrixCosts& matrix : exchanges.matrices) {
    as_factors += matrix.exchange != MatrixExchange::kWhole ? 1 : 0;
    const auto& box = matrix.box;
    table.add({fmt::to_string(matrix.key), fmt::to_string(matrix.rows),
               fmt::to_string(matrix.columns), milliseconds(matrix.whole.seconds(inputs)),
               box ? milliseconds(box->seconds(inputs)) : "-",
               box ? milliseconds(box->box_product_s) : "-",
               inputs.to_ranks ? milliseconds(matrix.ranks.seconds(inputs)) : "-",
               inputs.to_ranks ? milliseconds(matrix.ranks.product_s) : "-",
               std::string(name_of(matrix.exchange)), spec.keys[matrix.key].name});
  }
  return fmt::format(
             "Ways of matrices (ranks: {}; samples of each: {}; links of a rank {:g} Gbit/s, of "
             "the box {:g}; products of a rank {:g} GFLOP/s, of {} cores of the box {:g} each)\n",
             inputs.ranks, inputs.samples, inputs.worker_gbit_s, inputs.box_gbit_s,
             inputs.product_gflop_s, inputs.box_cores, inputs.box_product_gflop_s) +
         table.text() +
         fmt::format("All keys: {} ms whole, {} ms with {} of {} matrices as factors\n",
                     milliseconds(exchanges.all_whole.seconds(inputs)),
                     milliseconds(exchanges.chosen.seconds(inputs)), as_factors,
                     exchanges.matrices.size()) +
         (layers.empty() ? "" : describe_iterations(exchanges, inputs, layers));
}

}  // namespace phub
