// Hyperparameters by their names ("lr", "momentum", …), as jobs and configurations spell them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/kernels.h"

namespace phub::kernels {

// A set of optimizers, a bit for each.
constexpr uint32_t optimizers(std::initializer_list<Optimizer> all) {
  uint32_t set = 0;
  for (const Optimizer each : all) set |= uint32_t{1} << static_cast<uint32_t>(each);
  return set;
}
inline constexpr uint32_t kSteps = ~optimizers({Optimizer::kNone});  // all that make steps
inline constexpr uint32_t kAdams =
    optimizers({Optimizer::kAdam, Optimizer::kAdamW, Optimizer::kSparseAdam, Optimizer::kLamb,
                Optimizer::kMuon});

struct HyperField {
  const char* name;
  double Hyper::*member;
  double at_least;
  double below;               // exclusive
  bool of_job = false;        // the same for all groups of keys
  uint32_t used_by = kSteps;  // optimizers; with others it has no effect
};
inline constexpr std::array<HyperField, 33> kHyperFields = {{
    {"lr", &Hyper::lr, 0, HUGE_VAL},
    {"momentum", &Hyper::momentum, 0, HUGE_VAL, false,
     optimizers({Optimizer::kMomentum, Optimizer::kNesterov, Optimizer::kLars, Optimizer::kMuon})},
    {"dampening", &Hyper::dampening, -HUGE_VAL, HUGE_VAL, false,
     optimizers({Optimizer::kMomentum})},
    {"weight_decay", &Hyper::weight_decay, 0, HUGE_VAL},
    {"beta1", &Hyper::beta1, 0, 1, false, kAdams | optimizers({Optimizer::kLion})},
    {"beta2", &Hyper::beta2, 0, 1, false, kAdams | optimizers({Optimizer::kLion})},
    {"eps", &Hyper::eps, 0, HUGE_VAL, false,
     kAdams | optimizers({Optimizer::kAdagrad, Optimizer::kRmsprop, Optimizer::kAdadelta,
                          Optimizer::kLars, Optimizer::kAdafactor})},
    {"alpha", &Hyper::alpha, 0, HUGE_VAL, false, optimizers({Optimizer::kRmsprop})},
    {"rmsprop_momentum", &Hyper::rmsprop_momentum, 0, HUGE_VAL, true,
     optimizers({Optimizer::kRmsprop})},
    {"lr_decay", &Hyper::lr_decay, 0, HUGE_VAL, false, optimizers({Optimizer::kAdagrad})},
    {"grad_scale", &Hyper::grad_scale, 1e-30, HUGE_VAL, false, ~uint32_t{0}},
    {"rho", &Hyper::rho, 0, 1, false, optimizers({Optimizer::kAdadelta})},
    // Not lamb, adafactor and muon: the update is made, or its norm taken, together with the
    // gradient's norm, and so before the gradient is clipped, of which the update would be made.
    {"max_norm", &Hyper::max_norm, 0, HUGE_VAL, true,
     kSteps & ~optimizers({Optimizer::kLamb, Optimizer::kAdafactor, Optimizer::kMuon})},
    {"trust_coeff", &Hyper::trust_coeff, 0, HUGE_VAL, false, optimizers({Optimizer::kLars})},
    {"always_adapt", &Hyper::always_adapt, 0, HUGE_VAL, false,
     optimizers({Optimizer::kLars, Optimizer::kLamb})},
    {"nesterov", &Hyper::nesterov, 0, HUGE_VAL, false, optimizers({Optimizer::kMuon})},
    {"ns_steps", &Hyper::ns_steps, 0, 100, false, optimizers({Optimizer::kMuon})},
    {"match_rms", &Hyper::match_rms, 0, HUGE_VAL, false, optimizers({Optimizer::kMuon})},
    {"beta2_power", &Hyper::beta2_power, 0, HUGE_VAL, false, optimizers({Optimizer::kAdafactor})},
    {"eps2", &Hyper::eps2, 0, HUGE_VAL, false, optimizers({Optimizer::kAdafactor})},
    {"clip_threshold", &Hyper::clip_threshold, 1, HUGE_VAL, false,
     optimizers({Optimizer::kAdafactor})},
    {"lr_rounds_before", &Hyper::lr_rounds_before, -HUGE_VAL, HUGE_VAL},
    {"lr_warmup", &Hyper::lr_warmup, 0, HUGE_VAL},
    {"lr_warmup_from", &Hyper::lr_warmup_from, 0, HUGE_VAL},
    {"lr_exponential", &Hyper::lr_exponential, 0, HUGE_VAL},
    {"lr_inverse", &Hyper::lr_inverse, 0, HUGE_VAL},
    {"lr_inverse_power", &Hyper::lr_inverse_power, 0, HUGE_VAL},
    {"lr_polynomial", &Hyper::lr_polynomial, 0, HUGE_VAL},
    {"lr_polynomial_power", &Hyper::lr_polynomial_power, 0, HUGE_VAL},
    {"lr_cosine", &Hyper::lr_cosine, 0, HUGE_VAL},
    {"lr_end", &Hyper::lr_end, 0, HUGE_VAL},
    {"slack", &Hyper::slack, 0, 4294967296.0, true, ~uint32_t{0}},
    {"batch", &Hyper::batch, 0, 4294967296.0, true, ~uint32_t{0}},
}};
static_assert(sizeof(Hyper) == kHyperFields.size() * sizeof(double));

// The index of the field, kHyperFields.size() if there is none of that name.
size_t hyper_field(const std::string& name);

// Whether the optimizer's steps depend on the field. (`slack` and `batch` are no optimizer's.)
constexpr bool uses(Optimizer optimizer, const HyperField& field) {
  return (field.used_by & optimizers({optimizer})) != 0;
}

// "", or a sentence that names the optimizers which use the field, if its value is not 0 (which is
// as if there were none) and this optimizer does not use it. `name` may be of a group.
std::string unused(Optimizer optimizer, const HyperField& field, const std::string& name,
                   double value);

// Sets one value. Returns "", or a sentence that lists the known names or the allowed values; then
// nothing is set.
std::string set(Hyper& hyper, const std::string& name, double value);

// The learning rate of a round, from 1: `lr` times the factors of its schedules, a pure function in
// double. `lr_rounds_before` rounds came before the job's first. For the first `lr_warmup` rounds
// of all it rises from lr_warmup_from · lr in a line; then these are multiplied, where n rounds
// came before since then:
//   exponential   lr_exponential ^ n
//   inverse       (1 + lr_inverse · n) ^ −lr_inverse_power: Caffe's "inv"
//   polynomial    from 1 to lr_end in lr_polynomial rounds, as (1 − n/rounds) ^ lr_polynomial_power
//   cosine        from 1 to lr_end in lr_cosine rounds, as half a wave
double learning_rate(const Hyper& hyper, uint64_t round);

}  // namespace phub::kernels
