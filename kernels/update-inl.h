// The loop that every optimizer runs in: loads, one rule, stores, and the write-back in the same
// pass. A rule (optimizers/*-inl.h) says how many state arrays it has and how it changes one
// vector.
//
// A rule also holds its scalar part: PyTorch's defaults, and the floats of a Step, which
// are computed in double and cast, as PyTorch does.
#if defined(PHUB_KERNELS_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_UPDATE_INL_H_
#undef PHUB_KERNELS_UPDATE_INL_H_
#else
#define PHUB_KERNELS_UPDATE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/arrays.h"
#include "kernels/formats/formats-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// The place for new parameters besides `params`.
struct NoOut {
  static constexpr bool kStreams = false;
  template <class D>
  HWY_INLINE void store(D /*d*/, hn::Vec<D> /*v*/, size_t /*i*/) const {}
};

template <class Format, bool kStreaming>
struct Out {
  using T = typename Format::T;
  static constexpr bool kStreams = kStreaming;

  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, size_t i) const {
    Format::store(d, v, to + i);
  }
  template <class D>
  HWY_INLINE void stream_two(D d, hn::Vec<D> v0, hn::Vec<D> v1, size_t i) const {
    Format::stream_two(d, v0, v1, to + i);
  }
  // Elements before the first one that is aligned for a streaming store.
  HWY_INLINE size_t head(size_t vector_bytes) const {
    const size_t past = reinterpret_cast<uintptr_t>(to) % vector_bytes;
    return past == 0 ? 0 : (vector_bytes - past) / sizeof(T);
  }

  T* to;
};

// Updates one vector at element i, and returns the values that are written back.
template <class Rule, class D>
HWY_INLINE hn::Vec<D> update_one(D d, const Step& step, const Arrays& a, size_t i) {
  const auto g = hn::LoadU(d, a.g + i);
  if constexpr (!Rule::kHasParams) {
    return canonical_nan(d, g);
  } else {
    auto p = hn::LoadU(d, a.params + i);
    auto s0 = hn::Zero(d);
    auto s1 = hn::Zero(d);
    if constexpr (Rule::kStates > 0) s0 = hn::LoadU(d, a.state0 + i);
    if constexpr (Rule::kStates > 1) s1 = hn::LoadU(d, a.state1 + i);
    Rule::update(d, step, g, p, s0, s1);
    if constexpr (Rule::kStates > 0) hn::StoreU(canonical_nan(d, s0), d, a.state0 + i);
    if constexpr (Rule::kStates > 1) hn::StoreU(canonical_nan(d, s1), d, a.state1 + i);
    p = canonical_nan(d, p);
    hn::StoreU(p, d, a.params + i);
    return p;
  }
}

template <class Rule>
HWY_INLINE void prefetch_for(const Arrays& a, size_t i, size_t bytes) {
  if constexpr (Rule::kHasParams) prefetch<2048, 2>(a.params + i, bytes);
  if constexpr (Rule::kStates > 0) prefetch<2048, 2>(a.state0 + i, bytes);
  if constexpr (Rule::kStates > 1) prefetch<2048, 2>(a.state1 + i, bytes);
}

template <class Rule, class OutT>
void update_all(const Step& shared_step, const Arrays& shared_arrays, const OutT shared_out) {
  // Copies that no store can alias: they stay in registers.
  const Step step = shared_step;
  const Arrays a = shared_arrays;
  const OutT out = shared_out;
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  const size_t n = a.elements;
  size_t i = 0;
  if constexpr (OutT::kStreams) {
    const size_t head = std::min(n, out.head(lanes * sizeof(float)));
    for (; i < head; ++i) out.store(d1, update_one<Rule>(d1, step, a, i), i);
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      prefetch_for<Rule>(a, i, 2 * lanes * sizeof(float));
      const auto v0 = update_one<Rule>(d, step, a, i);
      const auto v1 = update_one<Rule>(d, step, a, i + lanes);
      out.stream_two(d, v0, v1, i);
    }
    hwy::FlushStream();
  } else {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      prefetch_for<Rule>(a, i, 2 * lanes * sizeof(float));
      out.store(d, update_one<Rule>(d, step, a, i), i);
      out.store(d, update_one<Rule>(d, step, a, i + lanes), i + lanes);
    }
  }
  for (; i + lanes <= n; i += lanes) out.store(d, update_one<Rule>(d, step, a, i), i);
  for (; i < n; ++i) out.store(d1, update_one<Rule>(d1, step, a, i), i);
}

template <class Rule, class Format>
void update_to(const Step& step, const Arrays& a) {
  auto* to = static_cast<typename Format::T*>(a.out);
  if (a.store == Store::kStreaming) {
    update_all<Rule>(step, a, Out<Format, true>{to});
  } else {
    update_all<Rule>(step, a, Out<Format, false>{to});
  }
}

template <class Rule, class... Format>
void update_in(const std::tuple<Format...>& /*all*/, const Step& step, const Arrays& a) {
  static constexpr void (*kTo[])(const Step&, const Arrays&) = {update_to<Rule, Format>...};
  kTo[static_cast<size_t>(a.out_dtype)](step, a);
}

template <class Rule>
void update(const Step& step, const Arrays& a) {
  if (a.out == nullptr) return update_all<Rule>(step, a, NoOut{});
  update_in<Rule>(PlainFormats(), step, a);
}

// The array whose norm a trust ratio compares with that of the parameters (trust.h): none; the
// gradient; or the update, which Rule::direction() makes.
enum class Measured : uint8_t { kNothing, kGradient, kDirection };

// Returns that array, which is in `to` if it is not there already.
template <class Rule>
const float* measured(const Step& step, const Arrays& a, float* to) {
  if constexpr (Rule::kMeasures == Measured::kDirection) {
    const auto one = [&](auto d, size_t i) HWY_ATTR {
      auto s0 = hn::LoadU(d, a.state0 + i);
      auto s1 = hn::LoadU(d, a.state1 + i);
      const auto g = hn::LoadU(d, a.g + i);
      hn::StoreU(Rule::direction(d, step, g, hn::LoadU(d, a.params + i), s0, s1), d, to + i);
    };
    const hn::ScalableTag<float> d;
    const hn::CappedTag<float, 1> d1;
    size_t i = 0;
    for (; i + hn::Lanes(d) <= a.elements; i += hn::Lanes(d)) one(d, i);
    for (; i < a.elements; ++i) one(d1, i);
    return to;
  }
  return a.g;
}

// The base of every rule; see optimizers/.
template <class Self, size_t kStateArrays>
struct Rule {
  static constexpr bool kHasParams = true;
  static constexpr Measured kMeasures = Measured::kNothing;
  static constexpr size_t kStates = kStateArrays;
  static size_t state_arrays(const Hyper& /*h*/) { return kStates; }
  static void run(const Step& step, const Arrays& a) { update<Self>(step, a); }
};

// g + decay · p, which PyTorch leaves out when the decay is zero (p may be infinite).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V with_weight_decay(D d, const Step& step, V g, V p) {
  if (step.weight_decay == 0.0f) return g;
  return hn::Add(g, hn::Mul(hn::Set(d, step.weight_decay), p));
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
