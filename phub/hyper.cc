#include "phub/hyper.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

using kernels::Hyper;

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

const Field* find(const std::string& name) {
  auto at = std::find_if(kFields.begin(), kFields.end(),
                         [&](const Field& field) { return name == field.name; });
  return at == kFields.end() ? nullptr : &*at;
}

void apply(Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) hyper.*find(name)->member = value;
}

HyperVersion version(uint64_t from_round, const Hyper& hyper, const KeyClasses& classes) {
  HyperVersion out{from_round, {}};
  for (const KeyClasses::Scales& scales : classes.classes) {
    Hyper scaled = hyper;
    scaled.lr *= scales.lr;
    scaled.weight_decay *= scales.decay;
    out.classes.push_back(scaled);
  }
  return out;
}

}  // namespace

void check_hyper(const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const Field* field = find(name);
    if (!field) {
      std::string known;
      for (const Field& f : kFields) known += (known.empty() ? "" : ", ") + std::string(f.name);
      fail(ErrorCode::kInvalid, "unknown hyperparameter '{}'; known are {}", name, known);
    }
    if (!std::isfinite(value) || value < field->at_least || value >= field->below) {
      fail(ErrorCode::kInvalid, "hyperparameter '{}' is {}: it must be at least {}{}", name, value,
           field->at_least, field->below == kInfinity ? "" : " and below 1");
    }
  }
}

KeyClasses key_classes(const JobSpec& spec) {
  KeyClasses out;
  std::map<std::pair<double, double>, uint16_t> seen;
  for (const KeySpec& key : spec.keys) {
    auto [at, is_new] = seen.try_emplace({key.lr_scale, key.decay_scale},
                                         static_cast<uint16_t>(out.classes.size()));
    if (is_new) {
      if (out.classes.size() == 65535) {
        fail(ErrorCode::kInvalid,
             "job '{}': more than 65535 different pairs of lr_scale and decay_scale", spec.name);
      }
      out.classes.push_back({key.lr_scale, key.decay_scale});
    }
    out.of_key.push_back(at->second);
  }
  return out;
}

std::vector<HyperVersion> hyper_table(const JobSpec& spec, kernels::Optimizer optimizer,
                                      const KeyClasses& classes,
                                      const std::vector<HyperChange>& changes) {
  Hyper hyper = kernels::default_hyper(optimizer);
  apply(hyper, spec.hyper);
  std::vector<HyperVersion> table = {version(0, hyper, classes)};
  std::vector<HyperChange> sorted = spec.schedule;
  sorted.insert(sorted.end(), changes.begin(), changes.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const HyperChange& a, const HyperChange& b) { return a.round < b.round; });
  for (const HyperChange& change : sorted) {
    apply(hyper, change.values);
    if (table.back().from_round == change.round) table.pop_back();
    table.push_back(version(change.round, hyper, classes));
  }
  return table;
}

}  // namespace phub
