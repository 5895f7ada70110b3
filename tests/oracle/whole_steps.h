// What steps of whole keys must compute (kernels/whole_key.h), in the plainest loops: Adafactor and
// Muon. It shares no code with the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/oracle/reference.h"

namespace phub::reference {

// Whether a key of that shape has such a step: with Muon matrices, unless ns_steps is 0; with
// Adafactor all.
bool steps_whole(Optimizer optimizer, const Hyper& hyper, std::span<const uint64_t> shape);
// How many of a key's elements have state, the first ones, in array 0 or 1.
size_t elements_with_state(Optimizer optimizer, const Hyper& hyper, std::span<const uint64_t> shape,
                           size_t elements, size_t array);

// The parameters become decay · p + scale · direction, and the state is another. `squares`: of the
// parameters before. `state`: has all elements, of which the first have some.
struct WholeStep {
  std::vector<float> direction, state;
  float decay = 1, scale = 0;

  float apply(float parameter, size_t element) const;
};
WholeStep whole_step(Optimizer optimizer, const Hyper& hyper, uint64_t t,
                     std::span<const uint64_t> shape, std::vector<float> gradient, double squares,
                     std::vector<float> state);

// One of rows × columns after so many steps of Newton and Schulz.
std::vector<float> orthogonal(std::vector<float> matrix, size_t rows, size_t columns, int steps,
                              double eps);

}  // namespace phub::reference
