// Optimizers that scale the step of each key by a trust ratio, LARS and LAMB. The ratio is made of
// two norms of the whole key, so a step has two passes: first measure each array that the key
// consists of, then optimize() with the ratio.
//
// You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (2017), section 5, and You
// et al.: Large Batch Optimization for Deep Learning (2019), algorithm 2, in the variants of timm
// (timm.optim.Lars and Lamb, which are those of NVIDIA's apex): a key whose weight decay is 0 has
// the ratio 1, unless always_adapt is not 0. Elements are rounded as there; norms are in double.
//
// Plain functions, no state, any thread.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace phub::kernels {

// Sums of squares of arrays, in double, and then their roots: of the parameters before the step,
// and of what the ratio compares them with. For lars that is the gradient, for lamb the update
// before the learning rate, with its weight decay.
struct KeyNorms {
  double parameters = 0, update = 0;
};

// Whether the optimizer has a trust ratio.
bool adapts(Optimizer o);

// The squares of `elements` elements of a key, in the order of sum_of_squares(). Changes nothing
// but `scratch`, which has as many elements. Zeros if the step does not adapt. REQUIRES: adapts(
// step.optimizer); arrays as in optimize().
KeyNorms measure(const Step& step, const float* g, const float* params, const float* state0,
                 const float* state1, size_t elements, float* scratch);

// The step's ratio, in double and cast: for lamb ‖p‖ / ‖u‖, for lars trust_coeff · ‖p‖ / (‖u‖ +
// trust_decay · ‖p‖ + trust_eps), but at most the largest float. It is 1 if either norm is 0 or a
// NaN, or if the step does not adapt.
float trust_ratio(const Step& step, const KeyNorms& norms);

}  // namespace phub::kernels
