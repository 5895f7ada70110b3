// torch.optim.RMSprop (not centered), without and with momentum.
#if defined(PHUB_KERNELS_OPTIMIZERS_RMSPROP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_RMSPROP_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_RMSPROP_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_RMSPROP_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// v = α·v + ((1−α)·g)·g; p −= (lr·g) / (√v + ε).
struct PlainRmsprop : Rule<PlainRmsprop, 1> {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V denominator(D d, const Step& step, V g, V& squares) {
    squares = hn::Add(hn::Mul(hn::Set(d, step.alpha), squares),
                      hn::Mul(hn::Mul(hn::Set(d, step.one_minus_alpha), g), g));
    return hn::Add(hn::Sqrt(squares), hn::Set(d, step.eps));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& squares, V& /*s1*/) {
    g = with_weight_decay(d, step, g, p);
    const V below = denominator(d, step, g, squares);
    p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, step.step_size), g), below));
  }
};

// The rule with momentum: buf = μ·buf + g / (√v + ε); p −= lr·buf.
struct MomentumRmsprop : Rule<MomentumRmsprop, 2> {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& squares, V& buffer) {
    g = with_weight_decay(d, step, g, p);
    const V below = PlainRmsprop::denominator(d, step, g, squares);
    buffer = hn::Add(hn::Mul(hn::Set(d, step.momentum), buffer), hn::Div(g, below));
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), buffer));
  }
};

struct Rmsprop {
  static constexpr Measured kMeasures = Measured::kNothing;
  static Hyper defaults() { return {}; }
  static size_t state_arrays(const Hyper& h) { return h.rmsprop_momentum > 0 ? 2 : 1; }

  static void prepare(const Hyper& h, uint64_t /*t*/, Step& step) {
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.momentum = h.rmsprop_momentum > 0 ? static_cast<float>(h.rmsprop_momentum) : 0.0f;
    step.alpha = static_cast<float>(h.alpha);
    step.one_minus_alpha = static_cast<float>(1 - h.alpha);
    step.eps = static_cast<float>(h.eps);
    step.step_size = static_cast<float>(-h.lr);
  }

  static void run(const Step& step, const Arrays& a) {
    if (step.momentum > 0) {
      MomentumRmsprop::run(step, a);
    } else {
      PlainRmsprop::run(step, a);
    }
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
