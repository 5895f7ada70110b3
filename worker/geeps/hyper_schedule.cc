#include "worker/geeps/hyper_schedule.h"

#include <algorithm>
#include <iterator>

#include "kernels/hyper.h"
#include "transport/error.h"

namespace phub::geeps {
namespace {

void set(kernels::Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const std::string problem = kernels::set(hyper, name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
  }
}

bool is_before(uint64_t round, const HyperChange& change) { return round < change.round; }

}  // namespace

HyperSchedule::HyperSchedule(kernels::Optimizer optimizer, const JobSpec& spec)
    : optimizer_(optimizer), first_(kernels::default_hyper(optimizer)), changes_(spec.schedule) {
  set(first_, spec.hyper);
  for (const HyperChange& change : changes_) check(change.values);
  lay_out();
}

const kernels::Hyper& HyperSchedule::at(uint64_t round) const {
  const auto after = std::upper_bound(rounds_.begin(), rounds_.end(), round,
                                      [](uint64_t r, const auto& from) { return r < from.first; });
  return std::prev(after)->second;  // the first are from round 0 on
}

void HyperSchedule::change(uint64_t round, const std::map<std::string, double>& values,
                           uint64_t oldest) {
  check(values);
  changes_.insert(std::upper_bound(changes_.begin(), changes_.end(), round, is_before),
                  {.round = round, .values = values});
  const auto past = std::upper_bound(changes_.begin(), changes_.end(), oldest, is_before);
  for (auto change = changes_.begin(); change != past; ++change) set(first_, change->values);
  changes_.erase(changes_.begin(), past);
  lay_out();
}

void HyperSchedule::check(const std::map<std::string, double>& values) const {
  kernels::Hyper changed = first_;
  set(changed, values);
  if (optimizer_ == kernels::Optimizer::kRmsprop && values.contains("rmsprop_momentum")) {
    fail(ErrorCode::kInvalid, "rmsprop_momentum cannot change: it decides how much state there is");
  }
}

void HyperSchedule::lay_out() {
  rounds_ = {{0, first_}};
  for (const HyperChange& change : changes_) {
    kernels::Hyper hyper = rounds_.back().second;
    set(hyper, change.values);
    rounds_.emplace_back(change.round, hyper);
  }
}

}  // namespace phub::geeps
