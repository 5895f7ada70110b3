// Plain values one after another, as they lie in memory: the state that a rank saves in a
// checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub {

template <typename T>
void append_array(std::vector<std::byte>& to, std::span<const T> values) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto bytes = std::as_bytes(values);
  to.insert(to.end(), bytes.begin(), bytes.end());
}
template <typename T>
void append_value(std::vector<std::byte>& to, const T& value) {
  append_array(to, std::span(&value, 1));
}

// Takes values from the front of bytes that may be anything.
class ByteReader {
 public:
  // A check that fails throws Error(kMismatch, complaint).
  ByteReader(std::span<const std::byte> bytes, std::string complaint)
      : left_(bytes), complaint_(std::move(complaint)) {}

  void check(bool holds) const {
    if (!holds) throw Error(ErrorCode::kMismatch, complaint_);
  }
  bool at_end() const { return left_.empty(); }

  template <typename T>
  void take(std::span<T> into) {
    static_assert(std::is_trivially_copyable_v<T>);
    check(into.size_bytes() <= left_.size());
    if (into.empty()) return;
    std::memcpy(into.data(), left_.data(), into.size_bytes());
    left_ = left_.subspan(into.size_bytes());
  }
  template <typename T>
  T value() {
    T value = {};
    take(std::span(&value, 1));
    return value;
  }
  template <typename T>
  std::vector<T> array(uint64_t count) {
    check(count <= left_.size() / sizeof(T));
    std::vector<T> values(count);
    take(std::span(values));
    return values;
  }

 private:
  std::span<const std::byte> left_;
  std::string complaint_;
};

}  // namespace phub
