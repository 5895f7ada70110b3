#include "phub/hyper.h"

#include <algorithm>
#include <utility>

#include "kernels/hyper.h"
#include "transport/error.h"

namespace phub {
namespace {

using kernels::Hyper;

void apply(Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const std::string problem = kernels::set(hyper, name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
  }
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
  Hyper hyper;
  apply(hyper, values);
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
