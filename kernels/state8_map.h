// The maps of state8.h: from a magnitude up to 1 to a number, up to the largest code, and back. A
// map is linear in each of 7 decades, of which the upper one has twice the codes of the one below.
// So values are close to each other where they are small: the paper's dynamic map. The largest code
// is 1 exactly, and 0 is 0.
#pragma once

#include <array>
#include <cstddef>

namespace phub::kernels {

// Of first moments and momentum: codes 0 to 127, of either sign. Of second moments: 0 to 254.
template <bool kIsSigned>
struct StateMap {
  static constexpr size_t kDecades = 7;
  static constexpr std::array<double, kDecades> kEnds = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  static constexpr int codes_in(size_t decade) { return (kIsSigned ? 1 : 2) << decade; }
  static constexpr int codes_below(size_t decade) { return codes_in(decade) - codes_in(0); }
  static constexpr int kLargest = codes_below(kDecades);

  // In a decade the number is magnitude · factor + term, and the value number · factor + term.
  struct Line {
    float end;  // the last argument that is in the decade
    float factor, term;
  };
  using Lines = std::array<Line, kDecades>;
  static constexpr Lines numbers() {
    Lines lines{};
    for (size_t i = 0; i < kDecades; ++i) {
      const double begin = i > 0 ? kEnds[i - 1] : 0, factor = codes_in(i) / (kEnds[i] - begin);
      lines[i] = {static_cast<float>(kEnds[i]), static_cast<float>(factor),
                  static_cast<float>(codes_below(i) - begin * factor)};
    }
    return lines;
  }
  static constexpr Lines values() {
    Lines lines{};
    for (size_t i = 0; i < kDecades; ++i) {
      const double begin = i > 0 ? kEnds[i - 1] : 0, factor = (kEnds[i] - begin) / codes_in(i);
      lines[i] = {static_cast<float>(codes_below(i + 1)), static_cast<float>(factor),
                  static_cast<float>(begin - codes_below(i) * factor)};
    }
    Line& last = lines.back();
    const float product = last.factor * static_cast<float>(kLargest);
    last.term = 1 - product;
    return lines;
  }
};

}  // namespace phub::kernels
