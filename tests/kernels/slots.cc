#include "tests/kernels/slots.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/kernels/two_bits.h"

namespace phub::reference {
namespace {

using kernels::DType;
using kernels::Rounding;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A format of 8 bits: bits of the fraction, the bias of the exponent, the code of the largest
// value.
struct Small {
  int fraction_bits;
  int bias;
  uint8_t largest;
  bool has_infinity;
};
Small small(DType type) {
  return type == DType::kFp8E4M3 ? Small{3, 7, 0x7E, false} : Small{2, 15, 0x7B, true};
}

// Of the slot of int32, and what a float of its own would be: NaN for a scale that is none.
float sane_scale(float scale) {
  if (scale == 0 && !std::signbit(scale)) return scale;
  int exponent = 0;
  const bool is_power = std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5f;
  return is_power && scale >= std::ldexp(1.0f, -126) && scale <= std::ldexp(1.0f, 106) ? scale
                                                                                       : kNaN;
}

bool is_float(DType type) { return type == DType::kFp8E4M3 || type == DType::kFp8E5M2; }

float largest_value(DType type) {
  if (type == DType::kInt32) return 4194303;
  if (type == DType::kInt8) return 127;
  if (type == DType::kInt4) return 7;
  return value_of_code(type, small(type).largest);
}

// The values of all codes up to the largest, which are in the order of the codes.
std::vector<double> values_of(DType type) {
  std::vector<double> values;
  for (int code = 0; code <= small(type).largest; ++code) {
    values.push_back(value_of_code(type, static_cast<uint8_t>(code)));
  }
  return values;
}

uint8_t float_code(DType type, float y, const uint32_t* upper24) {
  static const std::vector<double> e4m3 = values_of(DType::kFp8E4M3);
  static const std::vector<double> e5m2 = values_of(DType::kFp8E5M2);
  const std::vector<double>& values = type == DType::kFp8E4M3 ? e4m3 : e5m2;
  const uint8_t sign = std::signbit(y) ? 0x80 : 0;
  const double magnitude = std::fabs(static_cast<double>(y));
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
  const auto below = static_cast<uint8_t>(above - values.begin() - 1);
  const double low = values[below];
  if (below == small(type).largest || low == magnitude) return sign | below;
  const double fraction = (magnitude - low) / (*above - low);
  bool up = fraction > 0.5 || (fraction == 0.5 && below % 2 == 1);
  if (upper24 != nullptr) up = std::ldexp(double(*upper24), -24) < static_cast<float>(fraction);
  return sign | static_cast<uint8_t>(below + (up ? 1 : 0));
}

int int_code(float y, const uint32_t* upper24) {
  if (upper24 == nullptr) return static_cast<int>(std::nearbyint(y));
  const float below = std::floor(y);
  const float fraction = y - below;
  return static_cast<int>(below) + (std::ldexp(double(*upper24), -24) < fraction ? 1 : 0);
}

uint64_t mix64(uint64_t h) {
  h ^= h >> 30;
  h *= 0xBF58476D1CE4E5B9u;
  h ^= h >> 27;
  h *= 0x94D049BB133111EBu;
  h ^= h >> 31;
  return h;
}

uint32_t mix32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  h ^= h >> 16;
  return h;
}

uint16_t bf16_of(float x, const uint32_t* random) {
  if (std::isnan(x)) return 0x7FC0;
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto upper = static_cast<uint16_t>(bits >> 16);
  if (std::isinf(x)) return upper;
  const uint32_t lower = bits & 0xFFFF;
  bool up = lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1);
  if (random != nullptr) up = lower + (*random >> 16) >= 0x10000;
  return up && (upper & 0x7FFF) != 0x7F7F ? upper + 1 : upper;
}

// Of a sparse format, one element in so many; else 0.
size_t share_of(DType type) {
  switch (type) {
    case DType::kTopK:
    case DType::kTopKInt4:
    case DType::kTopKInt2:
      return 32;
    case DType::kTopK10:
    case DType::kTopK10Int4:
    case DType::kTopK10Int2:
      return 10;
    case DType::kTopK100:
    case DType::kTopK100Int4:
    case DType::kTopK100Int2:
      return 100;
    case DType::kTopK1000:
    case DType::kTopK1000Int4:
    case DType::kTopK1000Int2:
      return 1000;
    default:
      return 0;
  }
}
bool has_codes(DType type) {
  return type == DType::kTopKInt4 || type == DType::kTopK10Int4 || type == DType::kTopK100Int4 ||
         type == DType::kTopK1000Int4;
}
bool has_two_bits(DType type) {
  return type == DType::kTopKInt2 || type == DType::kTopK10Int2 || type == DType::kTopK100Int2 ||
         type == DType::kTopK1000Int2;
}
size_t entries_of(DType type, size_t elements) {
  size_t entries = 0;
  while (entries * share_of(type) < elements) ++entries;
  while (entries < elements && entries < 8) ++entries;
  return entries;
}
size_t up_to_words(size_t bytes) { return (bytes + 3) / 4 * 4; }

void encode_scaled(std::span<const float> x, bool finite, DType type, const Rounding& rounding,
                   std::span<const size_t> elements, void* slot);

void encode_sparse(std::span<const float> x, bool finite, DType type, const Rounding& rounding,
                   void* slot) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto rank = [&](size_t i) {
    return std::isnan(x[i])   ? std::numeric_limits<double>::infinity()
           : std::isinf(x[i]) ? 1e300
                              : std::fabs(static_cast<double>(x[i]));
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return rank(a) > rank(b); });
  order.resize(entries_of(type, x.size()));
  std::sort(order.begin(), order.end());
  auto* to = static_cast<uint8_t*>(slot);
  if (has_codes(type) || has_two_bits(type)) {
    std::vector<float> chosen;
    std::memset(slot, 0, kernels::slot_bytes(type, x.size()));
    for (const size_t i : order) {
      chosen.push_back(x[i]);
      *to++ = static_cast<uint8_t>(i);
      *to++ = static_cast<uint8_t>(i >> 8);
    }
    uint8_t* const rest = static_cast<uint8_t*>(slot) + up_to_words(2 * order.size());
    if (has_two_bits(type)) return encode_two_bits(chosen, finite, rounding, order, rest);
    return encode_scaled(chosen, finite, DType::kInt4, rounding, order, rest);
  }
  for (const size_t i : order) {
    const uint32_t random = random_of(rounding, i);
    const uint16_t value = bf16_of(x[i], rounding.stochastic ? &random : nullptr);
    *to++ = static_cast<uint8_t>(i);
    *to++ = static_cast<uint8_t>(i >> 8);
    *to++ = static_cast<uint8_t>(value);
    *to++ = static_cast<uint8_t>(value >> 8);
  }
}

// elements: which of the chunk's they are.
void encode_scaled(std::span<const float> x, bool finite, DType type, const Rounding& rounding,
                   std::span<const size_t> elements, void* slot) {
  auto* codes = static_cast<uint8_t*>(slot);
  std::memset(slot, 0, kernels::slot_bytes(type, x.size()));
  float largest = 0;
  for (const float v : x) largest = std::max(largest, std::fabs(v));
  const float scale = finite ? scale_of(type, largest) : kNaN;
  for (size_t i = 0; finite && i < x.size(); ++i) {
    const uint32_t upper24 = random_of(rounding, elements[i]) >> 8;
    const uint32_t code = code_of(type, x[i], scale, rounding.stochastic ? &upper24 : nullptr);
    if (type == DType::kInt32) {
      for (size_t byte = 0; byte < 4; ++byte) {
        codes[4 * i + byte] = static_cast<uint8_t>(code >> 8 * byte);
      }
    } else if (type == DType::kInt4) {
      codes[i / 2] |= static_cast<uint8_t>((code & 15) << (i % 2 * 4));
    } else {
      codes[i] = static_cast<uint8_t>(code);
    }
  }
  std::memcpy(codes + kernels::slot_bytes(type, x.size()) - 4, &scale, 4);
}

struct Entry {
  size_t index;
  float value;
};
Entry entry_of(const void* slot, DType type, size_t i, size_t elements) {
  const auto* all = static_cast<const uint8_t*>(slot);
  if (has_codes(type) || has_two_bits(type)) {
    const size_t entries = entries_of(type, elements);
    const uint8_t* codes = all + up_to_words(2 * entries);
    const size_t index = all[2 * i] + 256u * all[2 * i + 1];
    if (index >= elements) return {elements - 1, kNaN};
    if (has_two_bits(type)) return {index, value_of_two_bits(codes, i, entries)};
    float scale;
    std::memcpy(&scale, codes + up_to_words((entries + 1) / 2), 4);
    return {index, value_of_code(DType::kInt4, codes[i / 2] >> (i % 2 * 4) & 15) * scale};
  }
  const auto* bytes = all + 4 * i;
  const size_t index = bytes[0] + 256u * bytes[1];
  if (index >= elements) return {elements - 1, kNaN};
  return {index, std::bit_cast<float>(uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24)};
}

float canonical(float v) { return std::isnan(v) ? std::bit_cast<float>(0x7FC00000u) : v; }

}  // namespace

float value_of_code(DType type, uint32_t code) {
  if (type == DType::kInt32) {
    const auto value = static_cast<int32_t>(code);
    return value < -4194304 || value > 4194303 ? kNaN : static_cast<float>(value);
  }
  const int small_code = static_cast<int>(code & 0xFF);
  if (type == DType::kInt8)
    return static_cast<float>(small_code < 128 ? small_code : small_code - 256);
  if (type == DType::kInt4) {
    return static_cast<float>(small_code % 16 < 8 ? small_code % 16 : small_code % 16 - 16);
  }
  const Small f = small(type);
  const int magnitude = small_code & 0x7F;
  if (magnitude > f.largest) {
    if (!f.has_infinity || magnitude > f.largest + 1) return kNaN;
    const float infinity = std::numeric_limits<float>::infinity();
    return code & 0x80 ? -infinity : infinity;
  }
  const int exponent = magnitude >> f.fraction_bits;
  const int fraction = magnitude % (1 << f.fraction_bits);
  const float value = exponent == 0 ? std::ldexp(float(fraction), 1 - f.bias - f.fraction_bits)
                                    : std::ldexp(1 + std::ldexp(float(fraction), -f.fraction_bits),
                                                 exponent - f.bias);
  return code & 0x80 ? -value : value;
}

float scale_of(DType type, float largest) {
  if (largest == 0) return 0;
  float scale;
  if (is_float(type) || type == DType::kInt32) {
    // Down from far above, as long as half of it still holds the largest.
    double power = std::ldexp(1.0, 200);
    while (largest <= double{largest_value(type)} * power / 2) power /= 2;
    scale = static_cast<float>(power);
  } else {
    scale = largest / largest_value(type);
  }
  const int most = type == DType::kFp8E4M3   ? 119
                   : type == DType::kFp8E5M2 ? 112
                   : type == DType::kInt32   ? 106
                   : type == DType::kInt8    ? 121
                                             : 125;
  return std::min(std::max(scale, std::ldexp(1.0f, -126)), std::ldexp(1.0f, most));
}

uint32_t code_of(DType type, float x, float scale, const uint32_t* upper24) {
  const float inverse = scale == 0 ? 0 : 1 / scale;
  const float limit = largest_value(type);
  const float y = std::max(std::min(x * inverse, limit), -limit);
  if (is_float(type)) return float_code(type, y, upper24);
  return static_cast<uint32_t>(int_code(y, upper24));
}

uint32_t random_of(const Rounding& r, size_t i) {
  constexpr uint64_t kC = 0x9E3779B97F4A7C15u;
  const uint64_t key = mix64(mix64(mix64(r.job + kC) + r.rank + kC) + r.round + kC);
  const auto element = static_cast<uint32_t>(r.element + i);
  return mix32(mix32(element ^ static_cast<uint32_t>(key)) ^ static_cast<uint32_t>(key >> 32));
}

bool encode(std::span<const float> gradient, std::span<float> residual, DType type,
            const Rounding& rounding, void* slot) {
  std::vector<float> x(gradient.begin(), gradient.end());
  bool finite = true;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!residual.empty()) x[i] = x[i] + residual[i];
    finite = finite && std::isfinite(x[i]);
  }
  if (share_of(type) > 0) {
    encode_sparse(x, finite, type, rounding, slot);
  } else {
    std::vector<size_t> elements(x.size());
    std::iota(elements.begin(), elements.end(), size_t{0});
    encode_scaled(x, finite, type, rounding, elements, slot);
  }
  if (!finite || residual.empty()) return finite;
  std::copy(x.begin(), x.end(), residual.begin());
  if (share_of(type) > 0) {
    for (size_t e = 0; e < entries_of(type, x.size()); ++e) {
      const Entry sent = entry_of(slot, type, e, x.size());
      residual[sent.index] = x[sent.index] - sent.value;
    }
  } else {
    const std::vector<float> sent = decode(slot, type, x.size());
    for (size_t i = 0; i < x.size(); ++i) residual[i] = x[i] - sent[i];
  }
  return true;
}

std::vector<float> decode(const void* slot, DType type, size_t elements) {
  std::vector<float> out(elements);
  const auto* codes = static_cast<const uint8_t*>(slot);
  if (share_of(type) > 0) {
    for (size_t e = 0; e < entries_of(type, elements); ++e) {
      const Entry sent = entry_of(slot, type, e, elements);
      out[sent.index] = out[sent.index] + sent.value;
    }
    return out;
  }
  float scale;
  std::memcpy(&scale, codes + kernels::slot_bytes(type, elements) - 4, 4);
  if (type == DType::kInt32) scale = sane_scale(scale);
  if (type == DType::kInt32 && scale == 0) return out;
  for (size_t i = 0; i < elements; ++i) {
    uint32_t code = type == DType::kInt4 ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i];
    if (type == DType::kInt32) std::memcpy(&code, codes + 4 * i, 4);
    out[i] = value_of_code(type, code) * scale;
  }
  return out;
}

namespace {

// In whole numbers, all of the largest scale.
std::vector<float> sum_of_integers(std::span<const void* const> slots, size_t n) {
  std::vector<float> total(n);
  float most = 0;
  for (const void* slot : slots) {
    float scale;
    std::memcpy(&scale, static_cast<const uint8_t*>(slot) + 4 * n, 4);
    scale = sane_scale(scale);
    if (std::isnan(scale)) return std::vector<float>(n, kNaN);
    most = std::max(most, scale);
  }
  for (size_t i = 0; i < n && most > 0; ++i) {
    int64_t whole = 0;
    bool wrong = false;
    for (const void* slot : slots) {
      float scale;
      std::memcpy(&scale, static_cast<const uint8_t*>(slot) + 4 * n, 4);
      if (scale == 0) continue;
      int32_t code;
      std::memcpy(&code, static_cast<const uint8_t*>(slot) + 4 * i, 4);
      wrong = wrong || code < -4194304 || code > 4194303;
      // Exact: 23 bits, and a power of two.
      const double units = std::ldexp(double(code), std::ilogb(scale) - std::ilogb(most));
      whole += static_cast<int64_t>(std::floor(units + 0.5));
    }
    total[i] = wrong ? kNaN : static_cast<float>(whole) * most;
  }
  return total;
}

}  // namespace

bool sum_coded(std::span<const void* const> slots, DType type, float factor, float* out, size_t n) {
  std::vector<float> total(n);
  if (type == DType::kInt32) {
    total = sum_of_integers(slots, n);
    slots = {};
    if (std::ranges::all_of(total, [](float v) { return v == 0; })) factor = std::fabs(factor);
  }
  for (size_t s = 0; s < slots.size(); ++s) {
    if (share_of(type) > 0) {
      for (size_t e = 0; e < entries_of(type, n); ++e) {
        const Entry sent = entry_of(slots[s], type, e, n);
        total[sent.index] = total[sent.index] + sent.value;
      }
    } else {
      const std::vector<float> values = decode(slots[s], type, n);
      for (size_t i = 0; i < n; ++i) total[i] = s == 0 ? values[i] : total[i] + values[i];
    }
  }
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    out[i] = canonical(total[i] * factor);
    finite = finite && std::isfinite(out[i]);
  }
  return finite;
}

bool is_finite(const void* slot, DType type, size_t elements) {
  if (share_of(type) > 0) {
    bool finite = true;
    for (size_t e = 0; e < entries_of(type, elements); ++e) {
      finite = finite && std::isfinite(entry_of(slot, type, e, elements).value);
    }
    return finite;
  }
  const std::vector<float> values = decode(slot, type, elements);
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace phub::reference
