// Folds: values that are brought together by another operation than the addition of gradients, and
// of other types than f32. An operation is associative and commutative, but for the rounding of
// f32 and f64: there the order counts, and is kept.
//
// Arrays are of words of 4 bytes; a value of 64 bits is two of them, the lower first. Nothing needs
// more than 4 bytes of alignment.
//
//   operation   identity      to ⊕ from
//   add         -0 or 0       to + from      integers wrap around
//   multiply    1             to · from      the same
//   min         +∞, largest   from < to ? from : to
//   max         -∞, smallest  from > to ? from : to
//   or          0             the bits of both; integers only
//
// A NaN that an addition or a multiplication makes is positive, quiet, without payload; min and max
// pass over a NaN in `from`. Results are the same bits on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace phub::kernels {

enum class ValueType : uint8_t { kF32, kF64, kI32, kI64 };
enum class Operation : uint8_t { kNone, kAdd, kMultiply, kMin, kMax, kOr };

struct Fold {
  ValueType type = ValueType::kF32;
  Operation operation = Operation::kNone;  // kNone: contributions are gradients, which are added

  constexpr explicit operator bool() const { return operation != Operation::kNone; }
  friend bool operator==(const Fold&, const Fold&) = default;
};

constexpr size_t words_of(ValueType type) {
  return type == ValueType::kF64 || type == ValueType::kI64 ? 2 : 1;
}

// "f32", "f64", "i32" or "i64"; "add", "multiply", "min", "max" or "or". Returns nullopt if there
// is no such fold.
std::optional<Fold> parse_fold(std::string_view type, std::string_view operation);

// to[i] = to[i] ⊕ from[i], of `words` words. REQUIRES: fold; words is a multiple of words_of(type).
void fold(const Fold& fold, const void* from, void* to, size_t words);
void fill_with_identity(const Fold& fold, void* to, size_t words);

}  // namespace phub::kernels
