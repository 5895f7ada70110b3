// The weight of a contribution, which multiplies its gradient in the sum of its round: what its
// rank said with the push (JobSpec::weights; else 1), times a factor below 1 if it comes late
// (JobSpec::late_decay). A mean divides by the sum of the weights. Box and worker both compute with
// these functions, so that a late rank knows what became of its gradient.
#pragma once

#include <cstdint>
#include <limits>

namespace phub {

// 2^-126, the smallest f32 that is not subnormal: a mean by it is still a finite number.
inline constexpr float kLeastWeight = std::numeric_limits<float>::min();

// Whether a rank may say it: a finite number, at least kLeastWeight.
constexpr bool is_weight(float weight) {
  return weight >= kLeastWeight && weight <= std::numeric_limits<float>::max();
}

// What becomes of a weight that is multiplied by a factor from 0 to 1; 0: the contribution is
// dropped, as there is nothing left of it.
constexpr float reduced_weight(float weight, float factor) {
  const float less = weight * factor;
  return less >= kLeastWeight ? less : 0;
}

// The factor of a contribution that is `age` rounds late: decay^age, multiplied one by one in f32.
constexpr float late_factor(float decay, uint64_t age) {
  if (decay == 1) return 1;
  float factor = 1;
  for (uint64_t i = 0; i < age && factor > 0; ++i) factor *= decay;
  return factor;
}

}  // namespace phub
