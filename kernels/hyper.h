// Hyperparameters by their names ("lr", "momentum", …), as jobs and configurations spell them.
#pragma once

#include <array>
#include <cmath>
#include <string>

#include "kernels/kernels.h"

namespace phub::kernels {

struct HyperField {
  const char* name;
  double Hyper::*member;
  double at_least;
  double below;         // exclusive
  bool of_job = false;  // the same for all groups of keys
};
inline constexpr std::array<HyperField, 12> kHyperFields = {{
    {"lr", &Hyper::lr, 0, HUGE_VAL},
    {"momentum", &Hyper::momentum, 0, HUGE_VAL},
    {"dampening", &Hyper::dampening, -HUGE_VAL, HUGE_VAL},
    {"weight_decay", &Hyper::weight_decay, 0, HUGE_VAL},
    {"beta1", &Hyper::beta1, 0, 1},
    {"beta2", &Hyper::beta2, 0, 1},
    {"eps", &Hyper::eps, 0, HUGE_VAL},
    {"alpha", &Hyper::alpha, 0, HUGE_VAL},
    {"rmsprop_momentum", &Hyper::rmsprop_momentum, 0, HUGE_VAL, true},
    {"lr_decay", &Hyper::lr_decay, 0, HUGE_VAL},
    {"grad_scale", &Hyper::grad_scale, 1e-30, HUGE_VAL},
    {"max_norm", &Hyper::max_norm, 0, HUGE_VAL, true},
}};
static_assert(sizeof(Hyper) == kHyperFields.size() * sizeof(double));

// The index of the field, kHyperFields.size() if there is none of that name.
size_t hyper_field(const std::string& name);

// Sets one value. Returns "", or a sentence that lists the known names or says what values are
// allowed; then nothing is set.
std::string set(Hyper& hyper, const std::string& name, double value);

}  // namespace phub::kernels
