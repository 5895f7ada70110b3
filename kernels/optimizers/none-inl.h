// No optimizer: the gradient itself is written back. This is also the place of folds.
#if defined(PHUB_KERNELS_OPTIMIZERS_NONE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_NONE_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_NONE_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_NONE_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct None : Rule<None, 0> {
  static constexpr bool kHasParams = false;
  static Hyper defaults() { return {}; }
  static void prepare(const Hyper& /*h*/, uint64_t /*t*/, Step& /*step*/) {}
  static void run(const Step& step, const Arrays& a) {
    if (a.out != nullptr) update<None>(step, a);
  }
};

// Every key has its own: kernels::fold() is called in place of this.
struct Folds : Rule<Folds, 0> {
  static Hyper defaults() { return {}; }
  static void prepare(const Hyper& /*h*/, uint64_t /*t*/, Step& /*step*/) {}
  static void run(const Step& /*step*/, const Arrays& /*a*/) {}
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
