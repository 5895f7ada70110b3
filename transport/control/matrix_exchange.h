// Finds the best way to exchange the gradients of matrices: whole, or as the sufficient factors
// that they are made of (Poseidon, 2015, section 4.3 and Algorithm 3): to the box, which multiplies
// and sends the parameters back (KeySpec::rank_limit), or through the box to all ranks, which
// multiply (worker/factors.h).
//
// The paper chooses by the bytes that all nodes send together. A round waits for the link with the
// longest time, so that time is compared here, with the time of the products that are then made;
// and for all matrices together, as they share the links. Links work both ways at once: factors to
// the box shorten the way there alone, and so the round where results are smaller than gradients. A
// pure function of its inputs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

struct ExchangeInputs {
  uint32_t ranks = 1;
  uint64_t samples = 1;             // samples of a rank in a round: rows of a layer's input
  double worker_gbit_s = 10;        // a rank's link, each way
  double box_gbit_s = 10;           // all NICs of the box together, each way
  double product_gflop_s = 50;      // a rank's products (bench/products)
  uint32_t box_cores = 0;           // cores that multiply, with a chunk of a matrix each; 0: none
  double box_product_gflop_s = 50;  // one of these cores
  double gradient_bytes = 4;        // an element that is sent whole (element_traffic())
  double result_bytes = 4;          // an element that comes back, but for factors, which are f32
  bool to_ranks = true;  // the ranks may multiply: parameters are theirs (optimizer none)
  bool or_rows = false;  // the box's keys with factors are such that may send rows, too
  // In place of `samples`, by key; 0: the key goes whole. Empty: all keys have `samples`.
  std::vector<uint64_t> samples_of = {};
};

// The cost of a round. In bytes: those that a rank sends and receives, and that the box receives
// and sends.
struct ExchangeCost {
  double worker_out = 0, worker_in = 0, box_in = 0, box_out = 0;
  double product_s = 0;      // time of each rank
  double box_product_s = 0;  // time of the box

  ExchangeCost& operator+=(const ExchangeCost& other);
  // Links work at the same time, both ways; the products do not, as they wait for factors, and
  // results for them.
  double seconds(const ExchangeInputs& inputs) const;
};
enum class MatrixExchange : uint8_t { kWhole, kBox, kRanks };
std::string_view name_of(MatrixExchange exchange);  // "whole", "box", "ranks"
ExchangeCost whole_cost(uint64_t elements, const ExchangeInputs& inputs);
// Returns nullopt if a job cannot have such a key (KeySpec::rank_limit), or if the box does not
// multiply.
std::optional<ExchangeCost> box_cost(uint64_t rows, uint64_t columns, const ExchangeInputs& inputs);
ExchangeCost ranks_cost(uint64_t rows, uint64_t columns, const ExchangeInputs& inputs);

struct LayerComputing;  // layer_computing.h

// A key of two dimensions.
struct MatrixCosts {
  uint32_t key = 0;
  uint64_t rows = 0, columns = 0;
  ExchangeCost whole, ranks;
  std::optional<ExchangeCost> box;
  MatrixExchange exchange = MatrixExchange::kWhole;  // the chosen way

  const ExchangeCost& cost() const {
    return exchange == MatrixExchange::kWhole ? whole
           : exchange == MatrixExchange::kBox ? *box
                                              : ranks;
  }
};

struct Exchanges {
  std::vector<MatrixCosts> matrices;  // in the order of the keys
  ExchangeCost all_whole, chosen;     // for all keys
  std::vector<ExchangeCost> whole_of_layer,
      chosen_of_layer;  // the same of each, if there are layers
};

// No other choice for any of the matrices takes a shorter time, if at most kMostUndecided of them
// are such that factors could be better; of more, no other choice for a single matrix does. (A way
// that has less of everything is the better one whatever the others do.) If `layers` is not empty,
// the time is that of an iteration with wait-free backpropagation (iteration_seconds()). Throws
// Error(kInvalid): an input is not positive.
inline constexpr size_t kMostUndecided = 12;
Exchanges choose_exchanges(const JobSpec& spec, const ExchangeInputs& inputs,
                           std::span<const LayerComputing> layers = {});

}  // namespace phub
