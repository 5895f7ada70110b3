#include "kernels/hyper.h"

#include <fmt/format.h>

#include <algorithm>

namespace phub::kernels {

size_t hyper_field(const std::string& name) {
  return static_cast<size_t>(std::find_if(kHyperFields.begin(), kHyperFields.end(),
                                          [&](const HyperField& f) { return name == f.name; }) -
                             kHyperFields.begin());
}

std::string unused(Optimizer optimizer, const HyperField& field, const std::string& name,
                   double value) {
  if (value == 0 || uses(optimizer, field)) return "";
  std::string users;
  for (const std::string_view other : optimizer_names()) {
    if (!uses(*parse_optimizer(other), field)) continue;
    users += fmt::format("{}{}", users.empty() ? "" : ", ", other);
  }
  if (field.used_by == kSteps) users = "all but none";
  return fmt::format(
      "hyperparameter '{}' is {}, and optimizer '{}' does not use it: it is for {}. Choose one "
      "(option optimizer), or leave it out",
      name, value, name_of(optimizer), users);
}

std::string set(Hyper& hyper, const std::string& name, double value) {
  const size_t at = hyper_field(name);
  if (at == kHyperFields.size()) {
    std::string known;
    for (const HyperField& f : kHyperFields) {
      known += (known.empty() ? "" : ", ") + std::string(f.name);
    }
    return fmt::format("unknown hyperparameter '{}'; known are {}", name, known);
  }
  const HyperField& field = kHyperFields[at];
  if (!std::isfinite(value) || value < field.at_least || value >= field.below) {
    return fmt::format("hyperparameter '{}' is {}: it must be at least {}{}", name, value,
                       field.at_least,
                       field.below == HUGE_VAL ? "" : fmt::format(" and below {}", field.below));
  }
  if (field.member == &Hyper::ns_steps && value != std::floor(value)) {
    return fmt::format("hyperparameter '{}' is {}: it must be a whole number", name, value);
  }
  hyper.*field.member = value;
  return "";
}

}  // namespace phub::kernels
