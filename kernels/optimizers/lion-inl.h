// Lion: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
#if defined(PHUB_KERNELS_OPTIMIZERS_LION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_LION_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_LION_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_LION_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// p = (1 − lr·decay)·p; p −= lr · sign(β1·m + (1−β1)·g); m = β2·m + (1−β2)·g. The sign of a zero
// and of a NaN is 0, as PyTorch's is.
struct Lion : Rule<Lion, 1> {
  static Hyper defaults() {
    Hyper h;
    h.lr = 1e-4;
    h.beta2 = 0.99;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t /*t*/, Step& step) {
    step.decay_factor = static_cast<float>(1 - h.lr * h.weight_decay);
    step.beta1 = static_cast<float>(h.beta1);
    step.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    step.beta2 = static_cast<float>(h.beta2);
    step.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    step.step_size = static_cast<float>(-h.lr);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V blend(D d, float kept, float added, V m, V g) {
    return hn::Add(hn::Mul(hn::Set(d, kept), m), hn::Mul(hn::Set(d, added), g));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V sign(D d, V v) {
    const V zero = hn::Zero(d);
    const V one = hn::Set(d, 1.0f);
    return hn::Sub(hn::IfThenElseZero(hn::Gt(v, zero), one),
                   hn::IfThenElseZero(hn::Lt(v, zero), one));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& /*s1*/) {
    p = hn::Mul(p, hn::Set(d, step.decay_factor));
    const V direction = sign(d, blend(d, step.beta1, step.one_minus_beta1, m, g));
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), direction));
    m = blend(d, step.beta2, step.one_minus_beta2, m, g);
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
