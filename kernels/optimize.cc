// The table of optimizers, and what is looked up in it. Each entry is a rule of optimizers/.
#include <algorithm>
#include <iterator>

#include "kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/optimizers/adadelta-inl.h"
#include "kernels/optimizers/adagrad-inl.h"
#include "kernels/optimizers/adam-inl.h"
#include "kernels/optimizers/lion-inl.h"
#include "kernels/optimizers/none-inl.h"
#include "kernels/optimizers/rmsprop-inl.h"
#include "kernels/optimizers/sgd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// PyTorch's defaults, and scalar and vector code of one optimizer.
struct Entry {
  Hyper (*defaults)();
  size_t (*state_arrays)(const Hyper&);
  void (*prepare)(const Hyper&, uint64_t t, Step&);
  void (*run)(const Step&, const Arrays&);
};

template <class Rule>
constexpr Entry entry_of() {
  return {Rule::defaults, Rule::state_arrays, Rule::prepare, Rule::run};
}

constexpr Entry kTable[] = {
#define PHUB_OPTIMIZER(constant, rule, ...) entry_of<rule>(),
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};

void Optimize(const Step& step, const Arrays& a) {
  kTable[static_cast<size_t>(step.optimizer)].run(step, a);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {
namespace {

constexpr std::string_view kNames[] = {
#define PHUB_OPTIMIZER(constant, rule, name, ...) name,
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};

// The scalar part is the same in every instruction set's table; this is the baseline's.
const HWY_NAMESPACE::Entry& entry(Optimizer o) {
  return HWY_NAMESPACE::kTable[static_cast<size_t>(o)];
}

}  // namespace

HWY_EXPORT(Optimize);

void optimize(const Step& step, const float* g, float* params, float* state0, float* state1,
              size_t elements, void* out, DType out_dtype, Store store) {
  HWY_DYNAMIC_DISPATCH(Optimize)
  (step, {g, params, state0, state1, elements, out, out_dtype, store});
}

std::span<const std::string_view> optimizer_names() {
  return std::span(kNames).first<static_cast<size_t>(Optimizer::kFold)>();
}

std::optional<Optimizer> parse_optimizer(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  if (found == std::end(kNames)) return std::nullopt;
  return static_cast<Optimizer>(found - std::begin(kNames));
}

std::string_view name_of(Optimizer o) { return kNames[static_cast<size_t>(o)]; }

Hyper default_hyper(Optimizer o) { return entry(o).defaults(); }

size_t state_arrays(Optimizer o, const Hyper& h) { return entry(o).state_arrays(h); }

Step make_step(Optimizer o, const Hyper& h, uint64_t t) {
  Step step;
  step.optimizer = o;
  step.first = t == 1;
  step.lr = static_cast<float>(h.lr);
  entry(o).prepare(h, t, step);
  return step;
}

}  // namespace phub::kernels
#endif
