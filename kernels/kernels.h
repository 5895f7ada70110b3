// Sums and optimizers over arrays: plain functions, no state, any thread.
//
// One source is compiled for every instruction set (SSE4, AVX2, AVX-512) and chosen at run time.
// Results are the same bits on all of them: additions happen in the order of `slots`, a multiply
// and an add are two roundings (no FMA), and the formulas are those of PyTorch's CPU optimizers
// with ATEN_CPU_CAPABILITY=default (scalars computed in double and cast to float).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>

namespace phub::kernels {

// Format of a gradient slot. Sums and state are always f32, and results are written in plain
// formats only. The header encode.h explains the bytes of the coded formats.
enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kFp8E4M3,
  kFp8E5M2,
  kInt32,
  kInt8,
  kInt4,
  kTopK,
  kTopK10,
  kTopK100,
  kTopK1000,
  kTopKInt4,
  kTopK10Int4,
  kTopK100Int4,
  kTopK1000Int4,
  kTopKInt2,
  kTopK10Int2,
  kTopK100Int2,
  kTopK1000Int2
};
enum class Coding : uint8_t {
  kPlain,         // an array of elements
  kScaled,        // an array of codes, then the f32 that they are multiples of
  kSparse,        // some of the elements, each with its index
  kSparseScaled,  // their indices, then their codes, then the f32 that these are multiples of
  kSparseLevels,  // their indices, then their codes, then the two bf16 that these stand for
};
struct Format {
  std::string_view name;
  Coding coding;
  size_t bits;       // per element, per code, or per entry with its index
  size_t share = 1;  // a chunk sends one element in so many
};
inline constexpr std::array<Format, 20> kFormats = {
    {{"f32", Coding::kPlain, 32},
     {"bf16", Coding::kPlain, 16},
     {"f16", Coding::kPlain, 16},
     {"fp8-e4m3", Coding::kScaled, 8},
     {"fp8-e5m2", Coding::kScaled, 8},
     {"int32", Coding::kScaled, 32},
     {"int8", Coding::kScaled, 8},
     {"int4", Coding::kScaled, 4},
     {"topk", Coding::kSparse, 32, 32},
     {"topk-10", Coding::kSparse, 32, 10},
     {"topk-100", Coding::kSparse, 32, 100},
     {"topk-1000", Coding::kSparse, 32, 1000},
     {"topk-int4", Coding::kSparseScaled, 4, 32},
     {"topk-10-int4", Coding::kSparseScaled, 4, 10},
     {"topk-100-int4", Coding::kSparseScaled, 4, 100},
     {"topk-1000-int4", Coding::kSparseScaled, 4, 1000},
     {"topk-int2", Coding::kSparseLevels, 2, 32},
     {"topk-10-int2", Coding::kSparseLevels, 2, 10},
     {"topk-100-int2", Coding::kSparseLevels, 2, 100},
     {"topk-1000-int2", Coding::kSparseLevels, 2, 1000}}};
inline constexpr size_t kPlainFormats = 3;  // they come first

constexpr const Format& format_of(DType t) { return kFormats[static_cast<size_t>(t)]; }
constexpr std::string_view name_of(DType t) { return format_of(t).name; }
std::optional<DType> parse_format(std::string_view name);  // any of kFormats
std::optional<DType> parse_dtype(std::string_view name);   // the plain ones
constexpr bool is_plain(DType t) { return format_of(t).coding == Coding::kPlain; }

// The bytes of one element. REQUIRES: is_plain(t); stops the program otherwise.
constexpr size_t bytes_of(DType t) {
  if (!is_plain(t)) std::abort();
  return format_of(t).bits / 8;
}

constexpr bool is_sparse(DType t) { return format_of(t).share > 1; }

// A sparse format sends one element in `share`, rounded up, but at least kLeastTopK, or all if
// there are fewer; of at most kTopKElements.
inline constexpr size_t kTopKElements = 65536;
inline constexpr size_t kLeastTopK = 8;
constexpr size_t top_k(DType t, size_t elements) {
  const size_t share = format_of(t).share;
  return std::max((elements + share - 1) / share, std::min(elements, kLeastTopK));
}
// The place of its codes in a slot: behind the indices, of 16 bits, at a multiple of 4 bytes.
constexpr size_t sparse_codes_offset(size_t entries) { return (entries + 1) / 2 * 4; }

// The place of the scale, or of the levels, in a slot: behind the codes, at a multiple of 4 bytes.
constexpr size_t scale_offset(DType t, size_t elements) {
  const size_t codes = is_sparse(t) ? top_k(t, elements) : elements;
  const size_t before = is_sparse(t) ? sparse_codes_offset(codes) : 0;
  return before + (codes * format_of(t).bits + 31) / 32 * 4;
}

// The bytes of a chunk's slot. A pure function of the plan: both sides compute it.
constexpr size_t slot_bytes(DType t, size_t elements) {
  switch (format_of(t).coding) {
    case Coding::kScaled:
    case Coding::kSparseScaled:
    case Coding::kSparseLevels:
      return scale_offset(t, elements) + sizeof(float);
    case Coding::kSparse:
      return top_k(t, elements) * sizeof(uint32_t);
    case Coding::kPlain:
      break;
  }
  return elements * bytes_of(t);
}

enum class Optimizer : uint8_t {
#define PHUB_OPTIMIZER(constant, rule, ...) constant,
#include "kernels/optimizers.def"
#undef PHUB_OPTIMIZER
};
std::optional<Optimizer> parse_optimizer(std::string_view name);  // "none", "sgd", "momentum", …
std::string_view name_of(Optimizer o);
std::span<const std::string_view> optimizer_names();  // in the order of the enum, without "fold"

// Hyperparameters, in double as PyTorch keeps them. Each optimizer uses the ones it knows.
struct Hyper {
  double lr = 0.01;
  double momentum =
      0.9;  // momentum, nesterov, lars, muon (rmsprop: only when rmsprop_momentum > 0)
  double dampening = 0.0;  // momentum
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  // adagrad and adadelta have their own: see default_hyper()
  double alpha = 0.99;
  double rmsprop_momentum = 0.0;
  double lr_decay = 0.0;    // adagrad
  double grad_scale = 1.0;  // gradients arrive multiplied by this (loss scaling); undone in the sum
  double rho = 0.9;         // adadelta
  double max_norm = 0.0;    // the norm that all gradients together are clipped to; 0: none
  double trust_coeff = 0.001;  // lars: the trust ratio is multiplied by this (trust.h)
  double always_adapt = 0.0;   // lars, lamb: not 0: keys without a weight decay have one, too
  // muon, of keys that are matrices; with 0 steps of the iteration these have steps of AdamW, too
  double nesterov = 1.0;  // 0: the momentum itself is made orthogonal
  double ns_steps = 5.0;
  double match_rms = 0.0;       // not 0: the rate is scaled to AdamW's, not as Jordan has it
  double beta2_power = 0.8;     // adafactor: β2 of step t is 1 − t^−beta2_power
  double eps2 = 1e-3;           // adafactor: the least size of parameters that the rate goes by
  double clip_threshold = 1.0;  // adafactor: the RMS that an update is clipped to
  // These change lr by the round: see learning_rate() in hyper.h.
  double lr_rounds_before = 0.0;
  double lr_warmup = 0.0;  // rounds; 0: none
  double lr_warmup_from = 0.0;
  double lr_exponential = 1.0;
  double lr_inverse = 0.0;
  double lr_inverse_power = 1.0;
  double lr_polynomial = 0.0;  // rounds; 0: none
  double lr_polynomial_power = 1.0;
  double lr_cosine = 0.0;  // rounds; 0: none
  double lr_end = 0.0;     // the end of lr_polynomial and lr_cosine
  // Out of lock-step: rounds that a rank may be ahead of the slowest, if the job allows as many.
  double slack = 4294967295.0;
  double batch = 0.0;  // samples of a rank's gradient, which it asks for; 0: as the program has it
};
Hyper default_hyper(Optimizer o);  // PyTorch's defaults

// f32 arrays of state per parameter: 0 to 2.
size_t state_arrays(Optimizer o, const Hyper& h);

// The numbers of one optimizer step, computed once per round (and per distinct lr/decay of a key).
struct Step {
  Optimizer optimizer = Optimizer::kNone;
  bool first = false;  // momentum buffers are assigned, not blended, in step 1
  float lr = 0;
  float momentum = 0;
  float one_minus_dampening = 1;
  float weight_decay = 0;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float eps = 0;
  float sqrt_bias_correction2 = 1;
  float step_size = 0;     // adam: -lr/bias_correction1; adagrad: -clr; others: -lr
  float decay_factor = 1;  // adamw, lion: 1 - lr·wd
  float alpha = 0, one_minus_alpha = 0;
  float bias_correction1 = 1;
  // lars, lamb: the trust ratio, and whether it may be another than 1; lars: the numbers that it is
  // made of (trust.h).
  float trust = 1;
  bool adapts = false;
  double trust_coeff = 1, trust_decay = 0, trust_eps = 0;
};
// t is the number of this step, from 1.
// REQUIRES: hyperparameters that change during a job do not change state_arrays().
Step make_step(Optimizer o, const Hyper& h, uint64_t t);

// The way in which results are written back. Streaming stores bypass the caches: they save reading
// the old lines, a third of the time of a large all-reduce, and cost a worker that reads a small
// result at once.
enum class Store : uint8_t { kCached, kStreaming };
inline constexpr Store kDefaultStore = Store::kStreaming;

// out[i] = (slots[0][i] + slots[1][i] + …, in this order) · factor, as f32.
// The first slot is assigned, not added to zero; no slots give +0. The multiplication by `factor`
// is one rounding after all additions; a factor of exactly 1 changes nothing.
// In a coded format the decoded values are added (encode.h); the sum of a sparse one begins at +0,
// and elements that a slot lacks are not added. The sum of "int32" is one of integers
// (fixed_point.h), of at most kMostSlots slots. Returns true if every result is finite. Slots and
// out need no alignment beyond their element's, 4 bytes for coded formats. Whatever a slot holds,
// sum() reads and writes nothing else. The first slot may be `out` itself, if it is f32.
bool sum(std::span<const void* const> slots, DType dtype, float factor, float* out,
         size_t elements);

// The sum of the squares of all elements, in double. Element i is added to lane i % kSquareLanes,
// in ascending order; then the lanes are added in theirs. The sum is not finite if an element is
// not.
inline constexpr size_t kSquareLanes = 16;
double sum_of_squares(const float* g, size_t elements);

// Index of the first slot that decodes to a NaN or an infinity, or -1 (then the sum overflowed).
int find_nonfinite(std::span<const void* const> slots, DType dtype, size_t elements);

// One optimizer step over `elements` parameters with gradient g (f32). Updates params and state in
// place; if `out` is not null also writes the new parameters there as `out_dtype`.
// For Optimizer::kNone, `params` may be null and `out` receives g. REQUIRES: state arrays as
// state_arrays() says (unused ones may be null); params != out; is_plain(out_dtype).
void optimize(const Step& step, const float* g, float* params, float* state0, float* state1,
              size_t elements, void* out, DType out_dtype, Store store);

// Converts n elements between formats (round to nearest even); within a format, copies the bytes.
// REQUIRES: both are plain. (encode.h has the others.)
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t elements);

// Instruction sets that this machine can run, best first ("AVX3", "AVX2", "SSE4", …), and a way for
// tests and benchmarks to force one (empty: choose freely; std::invalid_argument if this machine
// does not have it). It must not be called while kernels run.
std::span<const std::string_view> targets();
void force_target(std::string_view name);

}  // namespace phub::kernels
