// Adafactor and Muon: their defaults, and Muon's steps of keys that it does not make orthogonal.
// whole_key.h has the others.
#if defined(PHUB_KERNELS_OPTIMIZERS_WHOLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_OPTIMIZERS_WHOLE_INL_H_
#undef PHUB_KERNELS_OPTIMIZERS_WHOLE_INL_H_
#else
#define PHUB_KERNELS_OPTIMIZERS_WHOLE_INL_H_
#endif

#include <cfloat>
#include <cstdlib>

#include "kernels/optimizers/adam-inl.h"
#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// All of its keys are stepped as whole keys.
struct Adafactor : Rule<Adafactor, 1> {
  static Hyper defaults() {
    Hyper h;
    h.lr = 1e-2;
    h.eps = FLT_EPSILON;
    return h;
  }

  static void prepare(const Hyper& /*h*/, uint64_t /*t*/, Step& /*step*/) {}
  static void run(const Step& /*step*/, const Arrays& /*a*/) { std::abort(); }
};

// AdamW, for the keys that are no matrices.
struct Muon : Rule<Muon, 2> {
  static Hyper defaults() {
    Hyper h;
    h.lr = 1e-3;
    h.momentum = 0.95;
    h.weight_decay = 0.1;
    h.eps = 1e-7;
    return h;
  }

  static void prepare(const Hyper& h, uint64_t t, Step& step) { AdamW::prepare(h, t, step); }

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE void update(D d, const Step& step, V g, V& p, V& m, V& v) {
    AdamW::update(d, step, g, p, m, v);
  }
};

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
