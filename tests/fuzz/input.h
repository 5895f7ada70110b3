// A fuzz target's input, as what calls need.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace phub::testing {

// Takes what the calls need off the front of the input; zeros at its end.
class Input {
 public:
  explicit Input(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  template <typename T = uint8_t>
  T take() {
    T value = {};
    const size_t size = std::min(sizeof value, bytes_.size());
    if (size > 0) std::memcpy(&value, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
    return value;
  }
  template <typename T, size_t N>
  T choose(const std::array<T, N>& from) {
    return from[take() % N];
  }

 private:
  std::span<const uint8_t> bytes_;
};

}  // namespace phub::testing
