// LARS and LAMB, whose steps are scaled by a trust ratio for each key (trust.h).
#if defined(PHUB_KERNELS_OPTIMIZERS_LAYERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_LAYERS_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_LAYERS_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_LAYERS_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// g = (g + decay · p) · ratio; then as Momentum, without dampening. The ratio compares p with the
// gradient before the decay.
struct Lars : Rule<Lars, 1> {
  static constexpr Measured kMeasures = Measured::kGradient;

  static Hyper defaults() {
    Hyper h;
    h.lr = 1.0;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t /*t*/, Step& step) {
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.momentum = static_cast<float>(h.momentum);
    step.step_size = static_cast<float>(-h.lr);
    step.adapts = h.weight_decay != 0 || h.always_adapt != 0;
    step.trust_coeff = h.trust_coeff;
    step.trust_decay = h.weight_decay;
    step.trust_eps = h.eps;
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& buffer, V& /*s1*/) {
    g = hn::Mul(with_weight_decay(d, step, g, p), hn::Set(d, step.trust));
    buffer = step.first ? g : hn::Add(hn::Mul(hn::Set(d, step.momentum), buffer), g);
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), buffer));
  }
};

// m = β1·m + (1−β1)·g; v = β2·v + ((1−β2)·g)·g; u = (m/bc1) / (√v/√bc2 + ε) + decay · p;
// p −= lr · (u · ratio), where bc = 1 − β^t. The ratio compares p with u.
struct Lamb : Rule<Lamb, 2> {
  static constexpr Measured kMeasures = Measured::kDirection;

  static Hyper defaults() {
    Hyper h;
    h.lr = 1e-3;
    h.eps = 1e-6;
    h.weight_decay = 1e-2;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    const auto steps = static_cast<double>(t);
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.beta1 = static_cast<float>(h.beta1);
    step.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    step.beta2 = static_cast<float>(h.beta2);
    step.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    step.eps = static_cast<float>(h.eps);
    step.bias_correction1 = static_cast<float>(1 - std::pow(h.beta1, steps));
    step.sqrt_bias_correction2 = static_cast<float>(std::sqrt(1 - std::pow(h.beta2, steps)));
    step.step_size = static_cast<float>(-h.lr);
    step.adapts = h.weight_decay != 0 || h.always_adapt != 0;
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V direction(D d, const Step& step, V g, V p, V& m, V& v) {
    m = hn::Add(hn::Mul(hn::Set(d, step.beta1), m), hn::Mul(hn::Set(d, step.one_minus_beta1), g));
    v = hn::Add(hn::Mul(hn::Set(d, step.beta2), v),
                hn::Mul(hn::Mul(hn::Set(d, step.one_minus_beta2), g), g));
    const V denominator =
        hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, step.sqrt_bias_correction2)), hn::Set(d, step.eps));
    const V u = hn::Div(hn::Div(m, hn::Set(d, step.bias_correction1)), denominator);
    return with_weight_decay(d, step, u, p);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& v) {
    const V u = hn::Mul(direction(d, step, g, p, m, v), hn::Set(d, step.trust));
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), u));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
