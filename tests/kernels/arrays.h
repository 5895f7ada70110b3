// What the kernel tests share: values that are hard, and arrays at odd places.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "kernels/kernels.h"

namespace phub::kernels::test {

// Set PHUB_SEED to replay; tests print the seed with every failure.
inline uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("PHUB_SEED");
    return text != nullptr ? std::stoull(text) : uint64_t{20180601};
  }();
  return value;
}

enum class Values {
  kOrdinary,  // normal numbers of a few magnitudes, zeros of both signs
  kFinite,    // the same with subnormals and the largest numbers
  kAny,       // random bits, infinities, NaNs with payloads
};

inline float make_value(std::mt19937_64& random, Values kind) {
  const uint64_t bits = random();
  const auto sign = static_cast<uint32_t>(bits >> 63) << 31;
  const auto fraction = static_cast<uint32_t>(bits) & 0x007FFFFF;
  const uint32_t dice = (bits >> 32) & 63;
  uint32_t exponent = 120 + ((bits >> 40) & 15);
  if (dice == 0) return std::bit_cast<float>(sign);
  if (kind != Values::kOrdinary) {
    if (dice < 4) exponent = 0;
    if (dice == 4) exponent = 254;
    if (dice >= 5 && dice < 10) exponent = (127 - 26) + ((bits >> 40) & 15);  // f16's subnormals
  }
  if (kind == Values::kAny) {
    if (dice == 10) return std::bit_cast<float>(sign | 0x7F800000);
    if (dice == 11) return std::bit_cast<float>(sign | 0x7F800000 | fraction | 1);
    if (dice == 12) return std::bit_cast<float>(static_cast<uint32_t>(random()));
  }
  return std::bit_cast<float>(sign | (exponent << 23) | fraction);
}

// An array that begins `offset` bytes after an aligned address, between guard bytes. With
// AddressSanitizer the allocation ends with the array instead, so that reads are caught too.
class Array {
 public:
  Array(size_t bytes, size_t offset) : begin_(kGuard + offset), bytes_(bytes) {
    storage_.reset(new (std::align_val_t(kGuard)) std::byte[begin_ + bytes_ + kAfter]);
    std::memset(storage_.get(), kFill, begin_ + bytes_ + kAfter);
  }
  Array(const void* values, size_t bytes, size_t offset) : Array(bytes, offset) {
    if (bytes > 0) std::memcpy(data(), values, bytes);
  }

  void* data() { return storage_.get() + begin_; }
  template <class T>
  T* as() {
    return static_cast<T*>(data());
  }
  bool holds(const void* expected) {
    return bytes_ == 0 || std::memcmp(data(), expected, bytes_) == 0;
  }
  // Nothing outside was written.
  bool intact() const {
    for (size_t i = 0; i < begin_ + bytes_ + kAfter; ++i) {
      const bool inside = i >= begin_ && i < begin_ + bytes_;
      if (!inside && storage_[i] != std::byte{kFill}) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kAfter = 0;
#else
  static constexpr size_t kAfter = 64;
#endif
  static constexpr int kFill = 0x5A;

  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kGuard)); }
  };
  size_t begin_, bytes_;
  std::unique_ptr<std::byte[], Free> storage_;
};

// Runs `body` with every instruction set of this machine, and then with none forced again.
template <class Body>
void for_each_target(Body body) {
  for (const std::string_view target : targets()) {
    force_target(target);
    SCOPED_TRACE("instruction set " + std::string(target));
    body();
    if (::testing::Test::HasFatalFailure()) break;
  }
  force_target("");
}

}  // namespace phub::kernels::test
