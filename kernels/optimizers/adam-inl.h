// torch.optim.Adam, AdamW and SparseAdam.
#if defined(PHUB_KERNELS_OPTIMIZERS_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_ADAM_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_ADAM_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_ADAM_INL_H_
#endif

#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// m = lerp(m, g, 1−β1); v = β2·v + ((1−β2)·g)·g; p −= (lr/bc1·m) / (√v/√bc2 + ε), where
// bc = 1 − β^t.
struct Adam : Rule<Adam, 2> {
  static Hyper defaults() {
    Hyper h;
    h.lr = 1e-3;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    const auto steps = static_cast<double>(t);
    step.weight_decay = static_cast<float>(h.weight_decay);
    step.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    step.beta2 = static_cast<float>(h.beta2);
    step.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    step.eps = static_cast<float>(h.eps);
    step.sqrt_bias_correction2 = static_cast<float>(std::sqrt(1 - std::pow(h.beta2, steps)));
    step.step_size = static_cast<float>(-(h.lr / (1 - std::pow(h.beta1, steps))));
  }

  // PyTorch's lerp, which begins at the nearer end: m + w·(g − m), or g − (g − m)·(1 − w).
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V lerp(D d, V m, V g, float weight) {
    const V way = hn::Sub(g, m);
    if (weight < 0.5f) return hn::Add(m, hn::Mul(hn::Set(d, weight), way));
    return hn::Sub(g, hn::Mul(way, hn::Set(d, 1.0f - weight)));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& v) {
    g = with_weight_decay(d, step, g, p);
    m = lerp(d, m, g, step.one_minus_beta1);
    v = hn::Add(hn::Mul(hn::Set(d, step.beta2), v),
                hn::Mul(hn::Mul(hn::Set(d, step.one_minus_beta2), g), g));
    const V denominator =
        hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, step.sqrt_bias_correction2)), hn::Set(d, step.eps));
    p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, step.step_size), m), denominator));
  }
};

// The decay is taken from the parameters, not added to the gradient.
struct AdamW : Rule<AdamW, 2> {
  static Hyper defaults() {
    Hyper h = Adam::defaults();
    h.weight_decay = 1e-2;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    Adam::prepare(h, t, step);
    step.weight_decay = 0;
    step.decay_factor = static_cast<float>(1 - h.lr * h.weight_decay);
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& v) {
    p = hn::Mul(p, hn::Set(d, step.decay_factor));
    Adam::update(d, step, g, p, m, v);
  }
};

// Does what torch.optim.SparseAdam does with a row: it rounds in other places, and adds ε before
// the correction. m += (1−β1)·(g − m); v += (1−β2)·(g·g − v); p −= lr·√bc2/bc1 · (m / (√v + ε)).
struct SparseAdam : Rule<SparseAdam, 2> {
  static Hyper defaults() { return Adam::defaults(); }

  static void prepare(const Hyper& h, uint64_t t, Step& step) {
    Adam::prepare(h, t, step);
    const auto steps = static_cast<double>(t);
    step.step_size = static_cast<float>(
        -(h.lr * std::sqrt(1 - std::pow(h.beta2, steps)) / (1 - std::pow(h.beta1, steps))));
  }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& v) {
    g = with_weight_decay(d, step, g, p);
    m = hn::Add(m, hn::Mul(hn::Sub(g, m), hn::Set(d, step.one_minus_beta1)));
    v = hn::Add(v, hn::Mul(hn::Sub(hn::Mul(g, g), v), hn::Set(d, step.one_minus_beta2)));
    const V denominator = hn::Add(hn::Sqrt(v), hn::Set(d, step.eps));
    p = hn::Add(p, hn::Mul(hn::Set(d, step.step_size), hn::Div(m, denominator)));
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
