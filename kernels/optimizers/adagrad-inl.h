// torch.optim.Adagrad.
#if defined(PHUB_KERNELS_OPTIMIZERS_ADAGRAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_ADAGRAD_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_ADAGRAD_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_ADAGRAD_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// s += g²; p −= (lr/(1 + (t−1)·lr_decay)·g) / (√s + ε).
struct Adagrad : Rule<Adagrad, 1> {
  static Hyper defaults() {
    Hyper h;
    h.eps = 1e-10;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.eps = static_cast<float>(h.eps);
    step.step_size = static_cast<float>(-(h.lr / (1 + static_cast<double>(t - 1) * h.lr_decay)));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& squares, V& /*s1*/) {
    g = with_weight_decay(d, step, g, p);
    squares = hn::Add(squares, hn::Mul(g, g));
    const V denominator = hn::Add(hn::Sqrt(squares), hn::Set(d, step.eps));
    p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, step.step_size), g), denominator));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
