#include "bench/zerocompute/gradients.h"

#include <algorithm>
#include <array>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/zerocompute/gradients.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace phub::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr uint32_t kSpread = 0x9E3779B1u;

// (element + seed) · kSpread for the elements of one vector after the other. `seed` mixes round and
// group of ranks.
template <class D>
class Spread {
 public:
  HWY_INLINE Spread(D d, uint32_t seed, uint32_t first)
      : value_(hn::Mul(hn::Iota(d, first + seed), hn::Set(d, kSpread))),
        step_(hn::Set(d, static_cast<uint32_t>(hn::Lanes(d)) * kSpread)) {}
  HWY_INLINE hn::Vec<D> next() {
    const hn::Vec<D> value = value_;
    value_ = hn::Add(value_, step_);
    return value;
  }

 private:
  hn::Vec<D> value_, step_;
};

// Eight nibbles per element, one for each rank of a group. (The scalar twin is hash() below.)
template <class D>
HWY_INLINE hn::Vec<D> mix(D d, hn::Vec<D> spread) {
  hn::Vec<D> h = hn::Xor(spread, hn::ShiftRight<15>(spread));
  h = hn::Mul(h, hn::Set(d, 0x85EBCA77u));
  return hn::Xor(h, hn::ShiftRight<13>(h));
}

// out[i] = the nibble at `shift` of hash(first + i), minus 8.
void fill_nibbles(uint32_t seed, uint32_t shift, uint32_t first, size_t n, float* out) {
  const hn::ScalableTag<uint32_t> du;
  const hn::RebindToSigned<decltype(du)> di;
  const hn::RebindToFloat<decltype(du)> df;
  const size_t lanes = hn::Lanes(du);
  Spread spread(du, seed, first);
  for (size_t i = 0; i < n; i += lanes) {
    const auto nibble = hn::And(hn::ShiftRightSame(mix(du, spread.next()), static_cast<int>(shift)),
                                hn::Set(du, 15));
    const auto value = hn::ConvertTo(df, hn::Sub(hn::BitCast(di, nibble), hn::Set(di, 8)));
    if (i + lanes <= n) {
      hn::StoreU(value, df, out + i);
    } else {
      HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)];
      hn::Store(value, df, tail);
      std::copy_n(tail, n - i, out + i);
    }
  }
}

// sums[i] += the first `ranks` (1 … 8) nibbles of hash(first + i), each minus 8.
void add_nibbles(uint32_t seed, uint32_t ranks, uint32_t first, size_t n, float* sums) {
  const hn::ScalableTag<uint32_t> du;
  const hn::RebindToSigned<decltype(du)> di;
  const hn::RebindToFloat<decltype(du)> df;
  const size_t lanes = hn::Lanes(du);
  Spread spread(du, seed, first);
  const auto mask = hn::Set(du, ranks >= 8 ? ~0u : (1u << (4 * ranks)) - 1);
  const auto low = hn::Set(du, 0x0F0F0F0Fu);
  const auto ones = hn::Set(du, 0x01010101u);
  const auto bias = hn::Set(di, static_cast<int32_t>(8 * ranks));
  for (size_t i = 0; i < n; i += lanes) {
    const auto h = hn::And(mix(du, spread.next()), mask);
    const auto pairs = hn::Add(hn::And(h, low), hn::And(hn::ShiftRight<4>(h), low));
    const auto total = hn::ShiftRight<24>(hn::Mul(pairs, ones));
    const auto value = hn::ConvertTo(df, hn::Sub(hn::BitCast(di, total), bias));
    if (i + lanes <= n) {
      hn::StoreU(hn::Add(hn::LoadU(df, sums + i), value), df, sums + i);
    } else {
      HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)];
      hn::Store(value, df, tail);
      for (size_t k = 0; i + k < n; ++k) sums[i + k] += tail[k];
    }
  }
}

}  // namespace phub::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub {
HWY_EXPORT(fill_nibbles);
HWY_EXPORT(add_nibbles);

namespace {

constexpr uint32_t kRanksPerHash = 8;

uint32_t seed_of(uint64_t round, uint32_t group) {
  uint64_t z = (round << 20) + group + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(z ^ (z >> 31));
}

uint32_t hash(uint32_t element, uint32_t seed) {
  uint32_t h = (element + seed) * 0x9E3779B1u;
  h = (h ^ (h >> 15)) * 0x85EBCA77u;
  return h ^ (h >> 13);
}

}  // namespace

int gradient_value(uint32_t rank, uint64_t round, uint64_t element) {
  const uint32_t h = hash(static_cast<uint32_t>(element), seed_of(round, rank / kRanksPerHash));
  return static_cast<int>((h >> (4 * (rank % kRanksPerHash))) & 15) - 8;
}

void fill_gradients(uint32_t rank, uint64_t round, uint64_t first, size_t n, kernels::DType dtype,
                    void* out) {
  const uint32_t seed = seed_of(round, rank / kRanksPerHash);
  const uint32_t shift = 4 * (rank % kRanksPerHash);
  if (dtype == kernels::DType::kF32) {
    HWY_DYNAMIC_DISPATCH(fill_nibbles)
    (seed, shift, static_cast<uint32_t>(first), n, static_cast<float*>(out));
    return;
  }
  std::array<float, 2048> block;
  for (size_t done = 0; done < n; done += block.size()) {
    const size_t count = std::min(block.size(), n - done);
    HWY_DYNAMIC_DISPATCH(fill_nibbles)
    (seed, shift, static_cast<uint32_t>(first + done), count, block.data());
    kernels::convert(block.data(), kernels::DType::kF32,
                     static_cast<std::byte*>(out) + done * kernels::bytes_of(dtype), dtype, count);
  }
}

void sum_of_gradients(uint32_t ranks, uint64_t round, uint64_t first, size_t n, float* out) {
  std::fill_n(out, n, 0.0f);
  for (uint32_t rank = 0; rank < ranks; rank += kRanksPerHash) {
    HWY_DYNAMIC_DISPATCH(add_nibbles)
    (seed_of(round, rank / kRanksPerHash), std::min(kRanksPerHash, ranks - rank),
     static_cast<uint32_t>(first), n, out);
  }
}

}  // namespace phub
#endif
