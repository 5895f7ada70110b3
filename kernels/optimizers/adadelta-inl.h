// torch.optim.Adadelta.
#if defined(PHUB_KERNELS_OPTIMIZERS_ADADELTA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_ADADELTA_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_ADADELTA_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_ADADELTA_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// s = ρ·s + ((1−ρ)·g)·g; d = √(a + ε) / √(s + ε) · g; a = ρ·a + ((1−ρ)·d)·d; p −= lr·d.
struct Adadelta : Rule<Adadelta, 2> {
  static Hyper defaults() {
    Hyper h;
    h.lr = 1;
    h.eps = 1e-6;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t /*t*/, Step& step) {
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.alpha = static_cast<float>(h.rho);
    step.one_minus_alpha = static_cast<float>(1 - h.rho);
    step.eps = static_cast<float>(h.eps);
    step.step_size = static_cast<float>(-h.lr);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V blend(D d, const Step& step, V mean, V x) {
    return hn::Add(hn::Mul(hn::Set(d, step.alpha), mean),
                   hn::Mul(hn::Mul(hn::Set(d, step.one_minus_alpha), x), x));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& squares, V& moves) {
    g = with_weight_decay(d, step, g, p);
    const V eps = hn::Set(d, step.eps);
    squares = blend(d, step, squares, g);
    const V root = hn::Sqrt(hn::Add(squares, eps));
    const V move = hn::Mul(hn::Div(hn::Sqrt(hn::Add(moves, eps)), root), g);
    moves = blend(d, step, moves, move);
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), move));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
