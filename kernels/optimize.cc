// The table of optimizers, and what is looked up in it. Each entry is a rule of optimizers/.
#include <algorithm>
#include <array>
#include <cfloat>
#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "kernels/kernels.h"
#include "kernels/state8.h"
#include "kernels/trust.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/optimizers/adadelta-inl.h"
#include "kernels/optimizers/adagrad-inl.h"
#include "kernels/optimizers/adam-inl.h"
#include "kernels/optimizers/layers-inl.h"
#include "kernels/optimizers/lion-inl.h"
#include "kernels/optimizers/none-inl.h"
#include "kernels/optimizers/rmsprop-inl.h"
#include "kernels/optimizers/sgd-inl.h"
#include "kernels/optimizers/whole-inl.h"
#include "kernels/state8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// PyTorch's defaults, and scalar and vector code of one optimizer.
struct Entry {
  Hyper (*defaults)();
  size_t (*state_arrays)(const Hyper&);
  void (*prepare)(const Hyper&, uint64_t t, Step&);
  void (*run)(const Step&, const Arrays&);
  const float* (*measured)(const Step&, const Arrays&, float* to);  // null: it has no trust ratio
};

template <class Rule>
constexpr Entry entry_of() {
  const float* (*measured_by)(const Step&, const Arrays&, float*) = nullptr;
  if constexpr (Rule::kMeasures != Measured::kNothing) measured_by = measured<Rule>;
  return {Rule::defaults, Rule::state_arrays, Rule::prepare, Rule::run, measured_by};
}

constexpr Entry kTable[] = {
#define PHUB_OPTIMIZER(constant, rule, ...) entry_of<rule>(),
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};

void Optimize(const Step& step, const Arrays& a) {
  kTable[static_cast<size_t>(step.optimizer)].run(step, a);
}

const float* MeasuredArray(const Step& step, const Arrays& a, float* to) {
  return kTable[static_cast<size_t>(step.optimizer)].measured(step, a, to);
}

// A few blocks at a time are decoded, so that they stay in the L1 cache.
void Optimize8(const Step& step, const Arrays& a, const State8& state0, const State8& state1) {
  constexpr size_t kTogether = 4 * kStateBlock;
  alignas(64) float f32[2][kTogether];
  const State8* const states[] = {&state0, &state1};
  Arrays part = a;
  for (size_t at = 0; at < a.elements; at += kTogether) {
    part.elements = std::min(kTogether, a.elements - at);
    part.g = a.g + at;
    part.params = a.params + at;
    if (a.out) part.out = static_cast<char*>(a.out) + at * bytes_of(a.out_dtype);
    for (size_t i = 0; i < 2; ++i) {
      if (*states[i]) DecodeState(states[i]->from(at), part.elements, f32[i]);
    }
    part.state0 = f32[0];
    part.state1 = f32[1];
    Optimize(step, part);
    for (size_t i = 0; i < 2; ++i) {
      if (*states[i]) EncodeState(f32[i], part.elements, states[i]->from(at));
    }
  }
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {
namespace {

constexpr std::string_view kNames[] = {
#define PHUB_OPTIMIZER(constant, rule, name, ...) name,
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};

constexpr std::array<std::string_view, 2> kStateNames[] = {
#define PHUB_OPTIMIZER(constant, rule, name, ...) {__VA_ARGS__},
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};

// First moments and momentum are; the other states are sums of squares.
constexpr std::array<std::string_view, 2> kSigned = {"exp_avg", "momentum_buffer"};
constexpr std::array<std::string_view, 5> kUnsigned = {"exp_avg_sq", "sum", "square_avg",
                                                       "acc_delta", "variance"};
constexpr bool is_signed(std::string_view state) {
  return std::ranges::find(kSigned, state) != kSigned.end();
}
constexpr bool are_known(std::initializer_list<std::string_view> states) {
  return std::ranges::all_of(states, [](std::string_view state) {
    return is_signed(state) || std::ranges::find(kUnsigned, state) != kUnsigned.end();
  });
}
#define PHUB_OPTIMIZER(constant, rule, name, ...) static_assert(are_known({__VA_ARGS__}), name);
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER

// The scalar part is the same in every instruction set's table; this is the baseline's.
const HWY_NAMESPACE::Entry& entry(Optimizer o) {
  return HWY_NAMESPACE::kTable[static_cast<size_t>(o)];
}

}  // namespace

HWY_EXPORT(Optimize);
HWY_EXPORT(MeasuredArray);
HWY_EXPORT(Optimize8);
HWY_EXPORT(EncodeState);
HWY_EXPORT(DecodeState);

void optimize(const Step& step, const float* g, float* params, float* state0, float* state1,
              size_t elements, void* out, DType out_dtype, Store store) {
  HWY_DYNAMIC_DISPATCH(Optimize)
  (step, {g, params, state0, state1, elements, out, out_dtype, store});
}

void optimize(const Step& step, const float* g, float* params, const State8& state0,
              const State8& state1, size_t elements, void* out, DType out_dtype, Store store) {
  HWY_DYNAMIC_DISPATCH(Optimize8)
  (step, {g, params, nullptr, nullptr, elements, out, out_dtype, store}, state0, state1);
}

bool adapts(Optimizer o) { return entry(o).measured != nullptr; }

// The arrays are only read.
KeyNorms measure(const Step& step, const float* g, const float* params, const float* state0,
                 const float* state1, size_t elements, float* scratch) {
  if (!step.adapts) return {};
  const Arrays arrays = {g,
                         const_cast<float*>(params),
                         const_cast<float*>(state0),
                         const_cast<float*>(state1),
                         elements,
                         nullptr,
                         DType::kF32,
                         Store::kCached};
  const float* const update = HWY_DYNAMIC_DISPATCH(MeasuredArray)(step, arrays, scratch);
  return {sum_of_squares(params, elements), sum_of_squares(update, elements)};
}

float trust_ratio(const Step& step, const KeyNorms& norms) {
  if (!step.adapts || !(norms.parameters > 0) || !(norms.update > 0)) return 1;
  double above = norms.parameters, below = norms.update;
  if (step.optimizer == Optimizer::kLars) {
    above *= step.trust_coeff;
    below += step.trust_decay * norms.parameters + step.trust_eps;
  }
  return static_cast<float>(std::min(above / below, double{FLT_MAX}));
}

void encode_state(const float* from, size_t elements, const State8& to) {
  HWY_DYNAMIC_DISPATCH(EncodeState)(from, elements, to);
}

void decode_state(const State8& from, size_t elements, float* to) {
  HWY_DYNAMIC_DISPATCH(DecodeState)(from, elements, to);
}

void round_state(float* state, size_t elements, bool is_signed) {
  uint8_t codes[kStateBlock];
  float scale = 0;
  const State8 block{codes, &scale, &scale, is_signed};
  for (size_t at = 0; at < elements; at += kStateBlock) {
    const size_t count = std::min(kStateBlock, elements - at);
    encode_state(state + at, count, block);
    decode_state(block, count, state + at);
  }
}

State8 state8_in(void* memory, uint64_t elements, Optimizer optimizer, size_t array) {
  auto* const codes = static_cast<uint8_t*>(memory);
  auto* const scales = reinterpret_cast<float*>(codes + elements);
  return {codes, scales, scales + elements / kStateBlock,
          is_signed(kStateNames[static_cast<size_t>(optimizer)][array])};
}

std::span<const std::string_view> optimizer_names() {
  return std::span(kNames).first<static_cast<size_t>(Optimizer::kFold)>();
}

std::optional<Optimizer> parse_optimizer(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  if (found == std::end(kNames)) return std::nullopt;
  return static_cast<Optimizer>(found - std::begin(kNames));
}

std::string_view name_of(Optimizer o) { return kNames[static_cast<size_t>(o)]; }

Hyper default_hyper(Optimizer o) { return entry(o).defaults(); }

size_t state_arrays(Optimizer o, const Hyper& h) { return entry(o).state_arrays(h); }

Step make_step(Optimizer o, const Hyper& h, uint64_t t) {
  Step step;
  step.optimizer = o;
  step.first = t == 1;
  step.lr = static_cast<float>(h.lr);
  entry(o).prepare(h, t, step);
  return step;
}

}  // namespace phub::kernels
#endif
