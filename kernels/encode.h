// Gradients into slots of a coded format, with error feedback: the part that a format cannot hold
// is kept in a residual and added to the next round's gradient (Seide et al., 1-bit SGD,
// Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
//
// Scaled formats: fp8-e4m3, fp8-e5m2, int32, int8, int4
//
// A slot of n elements holds n codes, zeros up to a multiple of 4 bytes, and the scale, an f32.
// An element decodes to code · scale, rounded once to f32. For a chunk whose largest |x| is M:
//
//             values of a code                                   scale
//   fp8-e4m3  OCP 8-bit floating point: no infinity, S.1111.111  the smallest power of two with
//             is NaN, largest 448                                M ≤ 448 · scale
//   fp8-e5m2  the same: as IEEE 754, largest 57,344              … with M ≤ 57,344 · scale
//   int32     whole numbers, ±4,194,303, of 32 bits, which       … with M ≤ 4,194,303 · scale
//             leaves room for their sums (fixed_point.h)
//   int8      two's complement; −128 is never sent               M / 127
//   int4      two's complement; −8 is never sent. Element 2i     M / 7
//             lies in the low half of byte i, 2i + 1 in the high
//
// The scale is at least 2^-126, and at most 2^119, 2^112, 2^106, 2^121, 2^125 in the order above,
// so that scale, 1 / scale and largest · scale are finite and normal. It is 0 if M is. An element's
// code is that of x · (1 / scale), both in f32, after it is limited to ±largest.
//
// Sparse formats: topk, topk-10, topk-100, topk-1000, which send one element in 32, 10, 100, 1000,
// and the same with -int4 or -int2
//
// A slot holds the top_k() elements of the largest magnitude (of equal ones those that come first),
// in ascending order, each as 32 bits: the index in the lower 16, the value as bf16 in the upper. A
// finite value stays finite: it is limited to ±the largest bf16. An entry whose index is not below
// n, which no encoder writes, decodes to NaN for the last element.
//
// With -int4 it holds their indices, then their codes, each part with zeros up to a multiple of 4
// bytes, and the scale, as a slot of int4 of these elements alone does.
//
// With -int2 it holds their indices, then their codes of 2 bits, each part with zeros up to a
// multiple of 4 bytes, and two levels, bf16: the lower one, then the higher one. Code e lies in
// byte e / 4 from bit 2 · (e % 4) on. Its lower bit says which level |x| has become, its upper bit
// that x is negative. There is no code for zero: what is sent is the largest. The levels are, of
// the magnitudes that are sent, from the smallest, m, to the largest, M:
//   nearest     the mean of those with |x| − m ≤ M − |x|, and that of the others; if m is 0, the
//               lower one is 0 and the higher one the mean of the others. If there are no others,
//               both are the same. Sums are in double in the order of the elements; a mean is
//               rounded to f32, and then to the nearest bf16, the even one in a tie.
//   stochastic  m rounded down, and M rounded up to bf16, so that every |x| lies between them
// A level is at most the largest bf16. |x| becomes the level l or h that (|x| − l) / (h − l), in
// f32 and within 0 and 1, is rounded to; the lower one if they are the same. So what nearest leaves
// of a chunk has less square than the chunk, unless all of it is zero. Both levels are NaN if an
// element is not finite.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace phub::kernels {

// Rounds to the nearest code, to the even one in a tie; or up or down at random, so that the mean
// of the sent values is the element. Either way a value that a code can hold is sent as it is.
//
// The random number of an element is a pure function of job, rank, round and element (mod 2^32), so
// that any program that knows these four can repeat it, in any order. It is 32 bits: with
//   mix(h): h ^= h >> 16, h *= 0x7FEB352D, h ^= h >> 15, h *= 0x846CA68B, h ^= h >> 16
//   mix64(h): h ^= h >> 30, h *= 0xBF58476D1CE4E5B9, h ^= h >> 27, h *= 0x94D049BB133111EB,
//             h ^= h >> 31
//   key = mix64(mix64(mix64(job + C) + rank + C) + round + C), C = 0x9E3779B97F4A7C15
// it is mix(mix(element ^ lower half of key) ^ upper half of key). Its upper 24 bits as a fraction
// of 1 are u, and f is the fraction between two codes that an element lies at: it becomes the upper
// one if u < f. (bf16: if the lower 16 bits of |x| and the upper 16 random ones carry.)
struct Rounding {
  bool stochastic = false;
  uint64_t job = 0;
  uint64_t rank = 0;
  uint64_t round = 0;
  uint64_t element = 0;  // the chunk's first
};

// Takes the place of the rank for results, which a job sends back to all ranks.
inline constexpr uint64_t kRoundingOfResults = ~uint64_t{0};

// The most elements of a slot.
constexpr size_t most_slot_elements(DType format) {
  return is_sparse(format) ? kTopKElements : SIZE_MAX / 64;
}

// With x = gradient + residual (f32; null: x = gradient): writes the slot of x, and x − decoded
// into the residual. Returns whether all x are finite. If not, the slot says so (its scale is NaN;
// without one it has the values that are not finite), and the residual stays as it was.
//
// The sent values and the new residual together are exactly gradient + residual wherever neither
// gradient + residual nor x − decoded is rounded. That is so for integers below 2^24 whose M is the
// largest code times a power of two, all of these times any power of two.
//
// REQUIRES: !is_plain(format); elements <= most_slot_elements(format). slot has slot_bytes(format,
// elements), all of which are written, at a multiple of 4 bytes.
bool encode(const float* gradient, float* residual, DType format, const Rounding& rounding,
            void* slot, size_t elements);

// out[i] = the value in the slot, in any format. It is sum() of one slot.
void decode(const void* slot, DType format, float* out, size_t elements);

// to[i] += the value in the slot; `decoded` has these values afterwards. It is sum() of both.
void add_decoded(const void* slot, DType format, float* decoded, float* to, size_t elements);

}  // namespace phub::kernels
