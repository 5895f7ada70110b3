#include "tests/oracle/folds.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "transport/error.h"

namespace phub::reference {
namespace {

template <class T>
T identity_of(const std::string& operation) {
  if (operation == "multiply") return 1;
  if constexpr (std::is_floating_point_v<T>) {
    if (operation == "min") return static_cast<T>(HUGE_VAL);
    if (operation == "max") return static_cast<T>(-HUGE_VAL);
    return static_cast<T>(-0.0);
  } else {
    if (operation == "min") return std::numeric_limits<T>::max();
    if (operation == "max") return std::numeric_limits<T>::min();
    return 0;
  }
}

// Of integers modulo 2^32 or 2^64.
template <class T>
T together(const std::string& operation, T a, T b) {
  if (operation == "min") return b < a ? b : a;
  if (operation == "max") return b > a ? b : a;
  if constexpr (std::is_floating_point_v<T>) {
    const T value = operation == "add" ? a + b : a * b;
    return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
  } else {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<T>(operation == "add" ? x + y : operation == "or" ? x | y : x * y);
  }
}

template <class T, class Visit>
void for_each(std::span<float> words, const Visit& visit) {
  PHUB_CHECK(words.size_bytes() % sizeof(T) == 0);
  for (size_t i = 0; i < words.size_bytes() / sizeof(T); ++i) {
    T value;
    std::byte* const at = std::as_writable_bytes(words).data() + i * sizeof(T);
    std::memcpy(&value, at, sizeof value);
    visit(i, value);
    std::memcpy(at, &value, sizeof value);
  }
}

template <class Visit>
void of_type(const std::string& type, const Visit& visit) {
  if (type == "f32") return visit(float());
  if (type == "f64") return visit(double());
  if (type == "i32") return visit(int32_t());
  visit(int64_t());
}

}  // namespace

std::vector<float> Fold::identity(size_t words) const {
  std::vector<float> out(words);
  of_type(type_, [&](auto zero) {
    using T = decltype(zero);
    for_each<T>(out, [this](size_t, T& value) { value = identity_of<T>(operation_); });
  });
  return out;
}

void Fold::add(std::span<const float> from, std::span<float> to) const {
  PHUB_CHECK(from.size() == to.size());
  of_type(type_, [&](auto zero) {
    using T = decltype(zero);
    for_each<T>(to, [&](size_t i, T& value) {
      T other;
      std::memcpy(&other, std::as_bytes(from).data() + i * sizeof(T), sizeof other);
      value = together<T>(operation_, value, other);
    });
  });
}

void Fold::add_slot(const void* slot, const Rows& rows, std::span<float> to) const {
  if (rows.columns == 0) return add({static_cast<const float*>(slot), to.size()}, to);
  for (size_t n = 0; n < rows.count(slot); ++n) {
    add({rows.elements(slot, n), rows.columns},
        to.subspan(rows.row(slot, n) * rows.columns, rows.columns));
  }
}

std::vector<float> Fold::all(const Group& group, std::span<const void* const> slots,
                             const Rows& rows, size_t words) const {
  std::vector<float> total = identity(words);
  for (const Group& part : group.parts) {
    if (!part.parts.empty()) {
      add(all(part, slots, rows, words), total);
    } else if (slots[part.rank]) {
      add_slot(slots[part.rank], rows, total);
    }
  }
  return total;
}

}  // namespace phub::reference
