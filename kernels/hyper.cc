#include "kernels/hyper.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace phub::kernels {
namespace {

struct Field {
  const char* name;
  double Hyper::*member;
  double at_least;
  double below;  // exclusive
};
constexpr double kInfinity = HUGE_VAL;
constexpr std::array<Field, 11> kFields = {{
    {"lr", &Hyper::lr, 0, kInfinity},
    {"momentum", &Hyper::momentum, 0, kInfinity},
    {"dampening", &Hyper::dampening, -kInfinity, kInfinity},
    {"weight_decay", &Hyper::weight_decay, 0, kInfinity},
    {"beta1", &Hyper::beta1, 0, 1},
    {"beta2", &Hyper::beta2, 0, 1},
    {"eps", &Hyper::eps, 0, kInfinity},
    {"alpha", &Hyper::alpha, 0, kInfinity},
    {"rmsprop_momentum", &Hyper::rmsprop_momentum, 0, kInfinity},
    {"lr_decay", &Hyper::lr_decay, 0, kInfinity},
    {"grad_scale", &Hyper::grad_scale, 1e-30, kInfinity},
}};

}  // namespace

std::string set(Hyper& hyper, const std::string& name, double value) {
  const auto* const field =
      std::find_if(kFields.begin(), kFields.end(), [&](const Field& f) { return name == f.name; });
  if (field == kFields.end()) {
    std::string known;
    for (const Field& f : kFields) known += (known.empty() ? "" : ", ") + std::string(f.name);
    return fmt::format("unknown hyperparameter '{}'; known are {}", name, known);
  }
  if (!std::isfinite(value) || value < field->at_least || value >= field->below) {
    return fmt::format("hyperparameter '{}' is {}: it must be at least {}{}", name, value,
                       field->at_least, field->below == kInfinity ? "" : " and below 1");
  }
  hyper.*field->member = value;
  return "";
}

}  // namespace phub::kernels
