// Numbers that follow from what they are for.
#pragma once

#include <cmath>
#include <cstdint>

namespace phub::sim {

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9e3779b97f4a7c15ull + b + 0x632be59bd9b4e019ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Spread over some binary orders of magnitude, so that another order of additions gives other bits.
inline float value_of(uint64_t hash) {
  const auto fraction = static_cast<float>(hash >> 40) * 0x1p-24f;
  const int exponent = static_cast<int>(hash & 15) - 9;
  return std::ldexp((hash & 16) ? 1 + fraction : -1 - fraction, exponent);
}

}  // namespace phub::sim
