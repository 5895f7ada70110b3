// torch.optim.SGD: plain, with momentum, with Nesterov momentum.
#if defined(PHUB_KERNELS_OPTIMIZERS_SGD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_SGD_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_SGD_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_SGD_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

struct Sgd : Rule<Sgd, 0> {
  static Hyper defaults() { return {}; }

  static void prepare(const Hyper& h, uint64_t /*t*/, Step& step) {
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.step_size = static_cast<float>(-h.lr);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& /*s0*/, V& /*s1*/) {
    g = with_weight_decay(d, step, g, p);
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), g));
  }
};

// buf = μ·buf + (1 − dampening)·g, in step 1 just g; then p −= lr·buf.
struct Momentum : Rule<Momentum, 1> {
  static Hyper defaults() { return {}; }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    Sgd::prepare(h, t, step);
    step.momentum = static_cast<float>(h.momentum);
    step.one_minus_dampening = static_cast<float>(1 - h.dampening);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V blend(D d, const Step& step, V g, V buffer) {
    if (step.first) return g;
    return hn::Add(hn::Mul(hn::Set(d, step.momentum), buffer),
                   hn::Mul(hn::Set(d, step.one_minus_dampening), g));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& buffer, V& /*s1*/) {
    buffer = blend(d, step, with_weight_decay(d, step, g, p), buffer);
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), buffer));
  }
};

// The buffer is the same, without dampening; then p −= lr·(g + μ·buf).
struct Nesterov : Rule<Nesterov, 1> {
  static Hyper defaults() { return {}; }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    Momentum::prepare(h, t, step);
    step.one_minus_dampening = 1;
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& buffer, V& /*s1*/) {
    g = with_weight_decay(d, step, g, p);
    buffer = Momentum::blend(d, step, g, buffer);
    g = hn::Add(g, hn::Mul(hn::Set(d, step.momentum), buffer));
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), g));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
