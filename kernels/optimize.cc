// The table of optimizers, and what is looked up in it. Each entry is a rule of optimizers/.
#include <array>

#include "kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/optimizers/adadelta-inl.h"
#include "kernels/optimizers/adagrad-inl.h"
#include "kernels/optimizers/adam-inl.h"
#include "kernels/optimizers/none-inl.h"
#include "kernels/optimizers/rmsprop-inl.h"
#include "kernels/optimizers/sgd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// Name, PyTorch's defaults, and scalar and vector code of one optimizer.
struct Entry {
  std::string_view name;
  Hyper (*defaults)();
  size_t (*state_arrays)(const Hyper&);
  void (*prepare)(const Hyper&, uint64_t t, Step&);
  void (*run)(const Step&, const Arrays&);
};

template <class... Rules>
constexpr std::array<Entry, sizeof...(Rules)> table_of() {
  return {Entry{Rules::kName, Rules::defaults, Rules::state_arrays, Rules::prepare, Rules::run}...};
}

// In the order of enum Optimizer.
constexpr auto kTable = table_of<None, Sgd, Momentum, Nesterov, Adam, AdamW, Adagrad, Rmsprop,
                                 SparseAdam, Adadelta, Folds>();

void Optimize(const Step& step, const Arrays& a) {
  kTable[static_cast<size_t>(step.optimizer)].run(step, a);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {
namespace {

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

std::optional<Optimizer> parse_optimizer(std::string_view name) {
  for (size_t i = 0; i < HWY_NAMESPACE::kTable.size(); ++i) {
    if (HWY_NAMESPACE::kTable[i].name == name) return static_cast<Optimizer>(i);
  }
  return std::nullopt;
}

std::string_view name_of(Optimizer o) { return entry(o).name; }

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
