#include "kernels/fold.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/fold.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class V = hn::Vec<D>>
HWY_INLINE V with_one_nan(D d, V v) {
  if constexpr (std::is_floating_point_v<hn::TFromD<D>>) {
    const V nan = hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN());
    return hn::IfThenElse(hn::IsNaN(v), nan, v);
  } else {
    return v;
  }
}

struct Add {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V apply(D d, V to, V from) {
    return with_one_nan(d, hn::Add(to, from));
  }
};

struct Multiply {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V apply(D d, V to, V from) {
    return with_one_nan(d, hn::Mul(to, from));
  }
};

struct Min {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V apply(D /*d*/, V to, V from) {
    return hn::IfThenElse(hn::Lt(from, to), from, to);
  }
};

struct Max {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V apply(D /*d*/, V to, V from) {
    return hn::IfThenElse(hn::Lt(to, from), from, to);
  }
};

struct Or {
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V apply(D /*d*/, V to, V from) {
    return hn::Or(to, from);
  }
};

template <class T, class Op>
void fold_all(const void* from, void* to, size_t words) {
  const size_t n = words * sizeof(uint32_t) / sizeof(T);
  const auto* const in = static_cast<const T*>(from);
  auto* const out = static_cast<T*>(to);
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(Op::apply(d, hn::LoadU(d, out + i), hn::LoadU(d, in + i)), d, out + i);
  }
  for (; i < n; ++i) {
    hn::StoreU(Op::apply(d1, hn::LoadU(d1, out + i), hn::LoadU(d1, in + i)), d1, out + i);
  }
}

using FoldAll = void (*)(const void* from, void* to, size_t words);

// In the order of enum Operation, from kAdd on.
template <class T>
constexpr std::array<FoldAll, 5> operations_of() {
  if constexpr (std::is_floating_point_v<T>) {
    return {fold_all<T, Add>, fold_all<T, Multiply>, fold_all<T, Min>, fold_all<T, Max>, nullptr};
  } else {
    return {fold_all<T, Add>, fold_all<T, Multiply>, fold_all<T, Min>, fold_all<T, Max>,
            fold_all<T, Or>};
  }
}

// In the order of enum ValueType.
constexpr std::array<std::array<FoldAll, 5>, 4> kFolds = {
    operations_of<float>(), operations_of<double>(), operations_of<int32_t>(),
    operations_of<int64_t>()};

void fold_words(const kernels::Fold& fold, const void* from, void* to, size_t words) {
  const auto operation = static_cast<size_t>(fold.operation) - 1;
  kFolds[static_cast<size_t>(fold.type)][operation](from, to, words);
}

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub::kernels {
namespace {

constexpr std::array<std::string_view, 4> kTypes = {"f32", "f64", "i32", "i64"};
constexpr std::array<std::string_view, 5> kOperations = {"add", "multiply", "min", "max", "or"};

template <class T>
T identity_of(Operation operation) {
  using Limits = std::numeric_limits<T>;
  switch (operation) {
    case Operation::kMultiply:
      return T{1};
    case Operation::kMin:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case Operation::kMax:
      return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    default:
      return static_cast<T>(std::is_floating_point_v<T> ? -0.0 : 0);
  }
}

template <class T>
void fill(Operation operation, void* to, size_t words) {
  const T value = identity_of<T>(operation);
  auto* const bytes = static_cast<std::byte*>(to);
  for (size_t at = 0; at < words * sizeof(uint32_t); at += sizeof value) {
    std::memcpy(bytes + at, &value, sizeof value);
  }
}

}  // namespace

HWY_EXPORT(fold_words);

std::optional<Fold> parse_fold(std::string_view type, std::string_view operation) {
  const auto* const t = std::ranges::find(kTypes, type);
  const auto* const o = std::ranges::find(kOperations, operation);
  if (t == kTypes.end() || o == kOperations.end()) return std::nullopt;
  const Fold fold{static_cast<ValueType>(t - kTypes.begin()),
                  static_cast<Operation>(o - kOperations.begin() + 1)};
  const bool whole = fold.type == ValueType::kI32 || fold.type == ValueType::kI64;
  if (fold.operation == Operation::kOr && !whole) return std::nullopt;
  return fold;
}

void fold(const Fold& fold, const void* from, void* to, size_t words) {
  HWY_DYNAMIC_DISPATCH(fold_words)(fold, from, to, words);
}

void fill_with_identity(const Fold& fold, void* to, size_t words) {
  switch (fold.type) {
    case ValueType::kF32:
      return fill<float>(fold.operation, to, words);
    case ValueType::kF64:
      return fill<double>(fold.operation, to, words);
    case ValueType::kI32:
      return fill<int32_t>(fold.operation, to, words);
    case ValueType::kI64:
      return fill<int64_t>(fold.operation, to, words);
  }
}

}  // namespace phub::kernels
#endif
