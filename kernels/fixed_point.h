// The format int32 in the parts that its sum is made of, so that they can be done in different
// places: a worker aligns, a switch adds, the box makes floats of the sum. Together they are
// sum(kInt32), to the bit:
//
//   exponent = max over the slots of exponent_of(slot)
//   sum[i]   = align(slot 0)[i] + align(slot 1)[i] + …        in integers
//   out[i]   = float(sum[i]) · 2^exponent · factor            three roundings to f32, in this order
//
// A code c that counts 2^e becomes floor(c / 2^(exponent - e) + 1/2). The sum of up to kMostSlots
// slots fits 32 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phub::kernels {

inline constexpr int32_t kLargestCode = (1 << 22) - 1;  // -2^22 is none that is sent, and counts
inline constexpr size_t kMostSlots = 512;
// Below and above those of all other slots.
inline constexpr int kExponentOfZero = -32768;  // the scale is 0
inline constexpr int kExponentOfNaN = 32766;    // it is no power of two, or none that is sent

// The exponent of a slot of kInt32, whose scale is 2^exponent: from -126 to 106, or one of the two
// above.
int exponent_of(const void* slot, size_t elements);

// codes[i] = that of element first + i, as a multiple of 2^exponent; behind the slot's end 0. A
// code that is out of bounds stays so. REQUIRES: first <= elements; exponent >= exponent_of(slot);
// it is neither kExponentOfZero nor kExponentOfNaN.
void align(const void* slot, size_t elements, int exponent, size_t first, std::span<int32_t> codes);

// Computes the last line above. The result is +0 for kExponentOfZero, and NaN for kExponentOfNaN
// and any other exponent that no slot has. Returns true if every result is finite.
bool from_fixed_point(std::span<const int32_t> sums, int exponent, float factor, float* out);

}  // namespace phub::kernels
