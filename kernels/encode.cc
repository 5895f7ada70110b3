// encode and decode. A chunk is read twice, the second time from the cache: what an element becomes
// depends on the largest, or on all.
#include "kernels/encode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/encode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/formats/formats-inl.h"
#include "kernels/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// gradient + residual, if there is one.
template <bool kResidual>
struct Input {
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, size_t i) const {
    const auto g = hn::LoadU(d, gradient + i);
    if constexpr (kResidual) return hn::Add(g, hn::LoadU(d, residual + i));
    return g;
  }
  template <class D>
  HWY_INLINE void keep(D d, hn::Vec<D> rest, size_t i) const {
    if constexpr (kResidual) hn::StoreU(rest, d, residual + i);
  }
  // What usually comes next, while this chunk is being computed on: the gradient while it is read
  // first, the residual the second time. So the memory is busy all the time.
  HWY_INLINE void prefetch_gradient(size_t i, size_t bytes) const {
    prefetch_ahead<2>(gradient + i, n * sizeof(float), bytes);
  }
  HWY_INLINE void prefetch_residual(size_t i, size_t bytes) const {
    if constexpr (kResidual) prefetch_ahead<2>(residual + i, n * sizeof(float), bytes);
  }

  const float* gradient;
  float* residual;
  size_t n;
};

// The largest magnitude, as bits.
template <class In>
int32_t largest_of(const In& in) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const I32<decltype(d)> di;
  const size_t lanes = hn::Lanes(d);
  auto m0 = hn::Zero(di), m1 = hn::Zero(di);
  int32_t largest = 0;
  size_t i = 0;
  for (; i + 2 * lanes <= in.n; i += 2 * lanes) {
    m0 = hn::Max(m0, absolute_bits(d, in.load(d, i)));
    m1 = hn::Max(m1, absolute_bits(d, in.load(d, i + lanes)));
  }
  for (; i < in.n; ++i) largest = std::max(largest, hn::GetLane(absolute_bits(d1, in.load(d1, i))));
  return std::max(largest, hn::GetLane(hn::MaxOfLanes(di, hn::Max(m0, m1))));
}

// One vector of codes, and what they leave of it.
template <class Format, class Round, class In>
struct ScaledEncoder {
  template <class D>
  HWY_INLINE void one(D d, size_t i) const {
    const auto x = in.load(d, i);
    auto y = hn::Mul(x, hn::Set(d, inverse));
    y = hn::Clamp(y, hn::Set(d, -Format::kLargest), hn::Set(d, Format::kLargest));
    const Quantized<D> q = Format::quantize(d, y, round, i);
    Format::pack(d, q.codes, codes, i);
    in.keep(d, hn::Sub(x, hn::Mul(q.values, hn::Set(d, scale))), i);
  }

  In in;
  Round round;
  float scale, inverse;
  uint8_t* codes;
};

template <class Format, class Round, bool kResidual>
bool encode_scaled(const Input<kResidual>& in, const Rounding& rounding, void* slot) {
  auto* codes = static_cast<uint8_t*>(slot);
  const size_t n = in.n;
  const size_t behind = scale_offset(Format::kType, n);
  const int32_t largest = largest_of(in);
  const bool finite = largest < kInfinityBits;
  float scale = std::numeric_limits<float>::quiet_NaN();
  if (n > 0) std::memset(codes + behind - sizeof(float), 0, sizeof(float));
  if (finite) {
    scale = scale_of<Format>(std::bit_cast<float>(largest));
    const ScaledEncoder<Format, Round, Input<kResidual>> encoder{in, Round(rounding), scale,
                                                                 scale == 0 ? 0 : 1 / scale, codes};
    const hn::ScalableTag<float> d;
    const hn::CappedTag<float, 1> d1;
    const size_t lanes = hn::Lanes(d);
    size_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      in.prefetch_gradient(i, 2 * lanes * sizeof(float));
      in.prefetch_residual(i, 2 * lanes * sizeof(float));
      encoder.one(d, i);
      encoder.one(d, i + lanes);
    }
    for (; i + lanes <= n; i += lanes) encoder.one(d, i);
    for (; i < n; ++i) encoder.one(d1, i);
  } else {
    std::memset(codes, 0, behind);
  }
  std::memcpy(codes + behind, &scale, sizeof(scale));
  return finite;
}

// The largest magnitude, as bits; magnitudes of NaN are all the same. Fills up to whole vectors
// with -1.
template <class In>
int32_t store_magnitudes(const In& in, int32_t* magnitudes) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const I32<decltype(d)> di;
  const size_t lanes = hn::Lanes(d);
  auto most = hn::Zero(di);
  int32_t largest = 0;
  size_t i = 0;
  for (; i + lanes <= in.n; i += lanes) {
    const auto magnitude = absolute_bits(d, canonical_nan(d, in.load(d, i)));
    hn::Store(magnitude, di, magnitudes + i);
    most = hn::Max(most, magnitude);
  }
  for (; i < in.n; ++i) {
    magnitudes[i] = hn::GetLane(absolute_bits(d1, canonical_nan(d1, in.load(d1, i))));
    largest = std::max(largest, magnitudes[i]);
  }
  for (; i % lanes != 0; ++i) magnitudes[i] = -1;
  return std::max(largest, hn::GetLane(hn::MaxOfLanes(di, most)));
}

// The upper half of an f32, which is a bf16; of a finite one not more than the largest.
template <class Round>
uint32_t bf16_of(float x, const Round& round, size_t i) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > kInfinityBits) return 0x7FC00000;
  if (magnitude == kInfinityBits) return bits;
  const uint32_t rounded = (magnitude + round.before_cut(magnitude, i)) & 0xFFFF0000;
  return std::min(rounded, uint32_t{0x7F7F0000}) | (bits & 0x80000000);
}

// Writers of a sparse slot. put() of the next element, x, which is the chunk's `i`th, returns the
// value that was written; end() comes last.
template <class Round>
class Bf16Writer {
 public:
  Bf16Writer(void* slot, DType /*type*/, const Chosen& /*chosen*/, const Rounding& rounding)
      : to_(static_cast<char*>(slot)), round_(rounding) {}
  HWY_INLINE float put(size_t i, float x) {
    const uint32_t value = bf16_of(x, round_, i);
    const uint32_t entry = value | static_cast<uint32_t>(i);
    std::memcpy(to_, &entry, sizeof(entry));
    to_ += sizeof(entry);
    return std::bit_cast<float>(value);
  }
  void end() {}

 private:
  char* to_;
  Round round_;
};

template <class Round>
class Int4Writer {
 public:
  Int4Writer(void* slot, DType type, const Chosen& chosen, const Rounding& rounding)
      : indices_(static_cast<uint8_t*>(slot)),
        codes_(indices_ + sparse_codes_offset(top_k(type, chosen.elements))),
        behind_(indices_ + scale_offset(type, chosen.elements)),
        round_(rounding),
        scale_(chosen.finite() ? scale_of<Int4>(std::bit_cast<float>(chosen.largest))
                               : std::numeric_limits<float>::quiet_NaN()),
        inverse_(scale_ == 0 ? 0 : 1 / scale_) {
    std::memset(slot, 0, behind_ - indices_);
  }
  HWY_INLINE float put(size_t i, float x) {
    const auto index = static_cast<uint16_t>(i);
    std::memcpy(indices_, &index, sizeof(index));
    indices_ += sizeof(index);
    const size_t entry = entries_++;
    if (std::isnan(scale_)) return scale_;
    const hn::CappedTag<float, 1> d1;
    const float y = std::clamp(x * inverse_, -Int4::kLargest, Int4::kLargest);
    const auto q = Int4::quantize(d1, hn::Set(d1, y), round_, i);
    Int4::pack(d1, q.codes, codes_, entry);
    return hn::GetLane(q.values) * scale_;
  }
  void end() { std::memcpy(behind_, &scale_, sizeof(scale_)); }

 private:
  uint8_t* indices_;
  uint8_t* codes_;
  uint8_t* behind_;
  Round round_;
  float scale_, inverse_;
  size_t entries_ = 0;
};

template <class Round>
class Int2Writer {
 public:
  Int2Writer(void* slot, DType type, const Chosen& chosen, const Rounding& rounding)
      : indices_(static_cast<uint8_t*>(slot)),
        codes_(indices_ + sparse_codes_offset(top_k(type, chosen.elements))),
        behind_(indices_ + scale_offset(type, chosen.elements)),
        round_(rounding),
        bits_(levels_of(chosen, rounding.stochastic)),
        levels_(bits_) {
    std::memset(slot, 0, behind_ - indices_);
  }
  HWY_INLINE float put(size_t i, float x) {
    const auto index = static_cast<uint16_t>(i);
    std::memcpy(indices_, &index, sizeof(index));
    indices_ += sizeof(index);
    const uint32_t sign = std::bit_cast<uint32_t>(x) >> 31 << 1;
    const uint32_t code = sign | (bits_ == Levels::kNone ? 0 : is_high(i, std::fabs(x)));
    store_two_bits(code, codes_, entries_++);
    return levels_.values[code];
  }
  void end() { std::memcpy(behind_, &bits_, sizeof(bits_)); }

 private:
  static uint32_t levels_of(const Chosen& chosen, bool stochastic) {
    if (!chosen.finite()) return Levels::kNone;
    const auto for_each = [&chosen](const auto& visit) { chosen.for_each(visit); };
    return choose_levels(for_each, std::bit_cast<float>(chosen.largest), stochastic);
  }
  // 1 or 0, by where between the levels the magnitude lies.
  HWY_INLINE uint32_t is_high(size_t i, float magnitude) const {
    if (levels_.low == levels_.high) return 0;
    const float place = (magnitude - levels_.low) / (levels_.high - levels_.low);
    const hn::CappedTag<float, 1> d1;
    const auto whole = round_(d1, hn::Set(d1, std::clamp(place, 0.0f, 1.0f)), i);
    return static_cast<uint32_t>(hn::GetLane(whole.integers));
  }

  uint8_t* indices_;
  uint8_t* codes_;
  uint8_t* behind_;
  Round round_;
  uint32_t bits_;
  Levels levels_;
  size_t entries_ = 0;
};

// All of it goes into the residual first; what is sent is taken out again.
template <class Writer, class In>
struct SparseEncoder {
  template <class D>
  HWY_INLINE void one(D d, size_t i) {
    const auto x = in.load(d, i);
    if (chosen.finite()) in.keep(d, x, i);
    HWY_ALIGN float values[hn::MaxLanes(d)];
    hn::Store(x, d, values);
    chosen.visit_vector(d, i, [&](size_t at) { send(at, values[at - i]); });
  }

  HWY_INLINE void send(size_t i, float x) {
    const float sent = writer.put(i, x);
    const hn::CappedTag<float, 1> d1;
    if (chosen.finite()) in.keep(d1, hn::Set(d1, x - sent), i);
  }

  In in;
  Writer writer;
  Chosen chosen;
};

template <Coding kCoding, class Round>
using WriterOf = std::conditional_t<
    kCoding == Coding::kSparse, Bf16Writer<Round>,
    std::conditional_t<kCoding == Coding::kSparseScaled, Int4Writer<Round>, Int2Writer<Round>>>;

template <class Format, class Round, bool kResidual>
bool encode_sparse(const Input<kResidual>& in, const Rounding& rounding, void* slot) {
  using Writer = WriterOf<Format::kCoding, Round>;
  HWY_ALIGN int32_t magnitudes[kTopKElements];
  const int32_t largest = store_magnitudes(in, magnitudes);
  const TopKChoice choice =
      TopKChooser(magnitudes, in.n).choose(top_k(Format::kType, in.n), largest);
  const Chosen chosen{magnitudes, in.n, largest, choice};
  SparseEncoder<Writer, Input<kResidual>> encoder{in, Writer(slot, Format::kType, chosen, rounding),
                                                  chosen};
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= in.n; i += lanes) {
    in.prefetch_gradient(i, lanes * sizeof(float));
    in.prefetch_residual(i, lanes * sizeof(float));
    encoder.one(d, i);
  }
  for (; i < in.n; ++i) encoder.one(d1, i);
  encoder.writer.end();
  return chosen.finite();
}

template <class Format, class Round, bool kResidual>
bool encode_as(const Input<kResidual>& in, const Rounding& rounding, void* slot) {
  if constexpr (is_sparse(Format::kType)) {
    return encode_sparse<Format, Round>(in, rounding, slot);
  } else {
    return encode_scaled<Format, Round>(in, rounding, slot);
  }
}

template <class Format>
bool encode_chunk(const Input<true>& in, const Rounding& rounding, void* slot) {
  const Input<false> alone{in.gradient, nullptr, in.n};
  if (rounding.stochastic) {
    return in.residual != nullptr ? encode_as<Format, Stochastic>(in, rounding, slot)
                                  : encode_as<Format, Stochastic>(alone, rounding, slot);
  }
  return in.residual != nullptr ? encode_as<Format, Nearest>(in, rounding, slot)
                                : encode_as<Format, Nearest>(alone, rounding, slot);
}

using EncodeChunk = bool (*)(const Input<true>&, const Rounding&, void*);
template <class... Coded>
constexpr std::array<EncodeChunk, sizeof...(Coded)> encoders_of(
    const std::tuple<Coded...>& /*coded*/) {
  return {encode_chunk<Coded>...};
}
// In the order of enum DType.
constexpr auto kEncoders = encoders_of(CodedFormats());

bool encode_slot(const float* gradient, float* residual, DType format, const Rounding& rounding,
                 void* slot, size_t n) {
  return kEncoders[static_cast<size_t>(format) - kPlainFormats]({gradient, residual, n}, rounding,
                                                                slot);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {

HWY_EXPORT(encode_slot);

bool encode(const float* gradient, float* residual, DType format, const Rounding& rounding,
            void* slot, size_t elements) {
  if (is_plain(format) || elements > most_slot_elements(format)) std::abort();
  return HWY_DYNAMIC_DISPATCH(encode_slot)(gradient, residual, format, rounding, slot, elements);
}

void decode(const void* slot, DType format, float* out, size_t elements) {
  sum({&slot, 1}, format, 1.0f, out, elements);
}

void add_decoded(const void* slot, DType format, float* decoded, float* to, size_t elements) {
  decode(slot, format, decoded, elements);
  const std::array<const void*, 2> added{to, decoded};
  sum(added, DType::kF32, 1.0f, to, elements);
}

}  // namespace phub::kernels
#endif
