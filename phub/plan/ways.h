// How the gradients of matrices are best exchanged: whole, or as the sufficient factors that they
// are made of (worker/factors.h; Poseidon, 2015, section 4.3 and Algorithm 3). Less is sent of the
// factors of few samples, but all ranks get those of all ranks, and multiply them.
//
// The paper chooses by the bytes that all nodes send together. What a round waits for is the link
// with the longest time, so that is what is compared here, with the products that each rank then
// makes; and of all matrices together, as they share the links. A pure function of its inputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

struct WayInputs {
  uint32_t ranks = 1;
  uint64_t samples = 1;         // of a rank in a round: rows of a layer's input
  double worker_gbit_s = 10;    // of a rank's link, each way
  double box_gbit_s = 10;       // of all NICs of the box together, each way
  double product_gflop_s = 50;  // of a rank's products (bench/products)
};

// Of a round. In bytes: what a rank sends and receives, what the box receives and sends.
struct WayCost {
  double worker_out = 0, worker_in = 0, box_in = 0, box_out = 0;
  double product_s = 0;  // of each rank

  WayCost& operator+=(const WayCost& other);
  // Links work at the same time, both ways; then come the products.
  double seconds(const WayInputs& inputs) const;
};
WayCost whole_way(uint64_t elements, const WayInputs& inputs);
WayCost factors_way(uint64_t rows, uint64_t columns, const WayInputs& inputs);

// A key of two dimensions.
struct MatrixWays {
  uint32_t key = 0;
  uint64_t rows = 0, columns = 0;
  WayCost whole, factors;
  bool as_factors = false;  // the way that is chosen
};

struct Ways {
  std::vector<MatrixWays> matrices;  // in the order of the keys
  WayCost all_whole, chosen;         // of all keys
};

// No other choice for any of the matrices takes a shorter time, if at most kMostUndecided of them
// are such that factors could be better; of more, the smaller ones are whole. (Where a way has less
// of everything it is the better one whatever the others do.) Throws Error(kInvalid): an input is
// not positive.
inline constexpr size_t kMostUndecided = 20;
Ways choose_ways(const JobSpec& spec, const WayInputs& inputs);

// For people.
std::string describe(const Ways& ways, const JobSpec& spec, const WayInputs& inputs);

}  // namespace phub
