// The choices of a job, an enum each, and one table of the words that stand for the values of an
// enum: in JSON, options, messages and documents.
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

enum class Consistency : uint8_t { kBsp, kSsp, kAsync };
enum class Reduction : uint8_t { kSum, kMean };
enum class Work : uint8_t { kAll, kSumOnly, kNone };  // less than all: only to measure the tax
enum class Initial : uint8_t { kZeros, kBroadcast };
enum class OnLoss : uint8_t { kShrink, kWait, kFail, kStop };
enum class OnNonFinite : uint8_t { kStop, kExclude, kPass, kSkip };
enum class Unused : uint8_t { kZero, kSkip };
enum class RoundingMode : uint8_t { kNearest, kStochastic };
enum class StateFormat : uint8_t { kF32, k8Bit };
enum class Saved : uint8_t { kYes, kNo };
enum class Weights : uint8_t { kNo, kYes };
enum class Grace : uint8_t { kFixed, kAuto };

// The option whose values an enum has.
template <class E>
inline constexpr std::string_view kOption = "";
// The words of an enum, in the order of its values, which begin at 0.
template <class E>
inline constexpr std::string_view kWords[] = {""};
template <>
inline constexpr std::string_view kOption<Consistency> = "consistency";
template <>
inline constexpr std::string_view kWords<Consistency>[] = {"bsp", "ssp", "async"};
template <>
inline constexpr std::string_view kOption<Reduction> = "reduction";
template <>
inline constexpr std::string_view kWords<Reduction>[] = {"sum", "mean"};
template <>
inline constexpr std::string_view kOption<Work> = "work";
template <>
inline constexpr std::string_view kWords<Work>[] = {"all", "sum", "none"};
template <>
inline constexpr std::string_view kOption<Initial> = "initial";
template <>
inline constexpr std::string_view kWords<Initial>[] = {"zeros", "broadcast"};
template <>
inline constexpr std::string_view kOption<OnLoss> = "on_loss";
template <>
inline constexpr std::string_view kWords<OnLoss>[] = {"shrink", "wait", "fail", "stop"};
template <>
inline constexpr std::string_view kOption<OnNonFinite> = "on_nonfinite";
template <>
inline constexpr std::string_view kWords<OnNonFinite>[] = {"stop", "exclude", "pass", "skip"};
template <>
inline constexpr std::string_view kOption<Unused> = "unused";
template <>
inline constexpr std::string_view kWords<Unused>[] = {"zero", "skip"};
template <>
inline constexpr std::string_view kOption<RoundingMode> = "rounding";
template <>
inline constexpr std::string_view kWords<RoundingMode>[] = {"nearest", "stochastic"};
template <>
inline constexpr std::string_view kOption<StateFormat> = "state_dtype";
template <>
inline constexpr std::string_view kWords<StateFormat>[] = {"f32", "8bit"};
template <>
inline constexpr std::string_view kOption<Saved> = "saved";
template <>
inline constexpr std::string_view kWords<Saved>[] = {"yes", "no"};
template <>
inline constexpr std::string_view kOption<Weights> = "weights";
template <>
inline constexpr std::string_view kWords<Weights>[] = {"no", "yes"};
template <>
inline constexpr std::string_view kOption<Grace> = "grace";
template <>
inline constexpr std::string_view kWords<Grace>[] = {"fixed", "auto"};

template <class E>
constexpr std::string_view word_of(E value) {
  return kWords<E>[static_cast<size_t>(value)];
}

template <class E>
constexpr std::optional<E> value_of(std::string_view word) {
  const auto at = std::find(std::begin(kWords<E>), std::end(kWords<E>), word);
  if (at == std::end(kWords<E>)) return std::nullopt;
  return static_cast<E>(at - std::begin(kWords<E>));
}

// Says which words there are, and which one may have been meant.
[[noreturn]] inline void refuse_word(std::string_view field, std::string_view word,
                                     const std::vector<std::string_view>& words) {
  const std::string near = nearest(word, words);
  fail(ErrorCode::kInvalid, "{}: must be one of {}, got '{}'{}", field, fmt::join(words, ", "),
       printable(word), near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

// The value of an option. It stands for its word as well: it can be made from it, compared with it
// and written.
template <class E>
class Choice {
 public:
  constexpr Choice() = default;
  constexpr Choice(E value) : value_(value) {}
  // Throws Error(kInvalid), which names the option and its words: there is no such word.
  template <std::convertible_to<std::string_view> Word>
  constexpr Choice(const Word& word) : value_(parse(word)) {}

  constexpr operator E() const { return value_; }
  constexpr std::string_view word() const { return word_of(value_); }

  friend constexpr bool operator==(const Choice& a, const Choice& b) = default;
  friend constexpr bool operator==(const Choice& a, E b) { return a.value_ == b; }
  template <std::convertible_to<std::string_view> Word>
  friend constexpr bool operator==(const Choice& a, const Word& word) {
    return a.word() == std::string_view(word);
  }

 private:
  static constexpr E parse(std::string_view word) {
    if (const std::optional<E> value = value_of<E>(word)) return *value;
    refuse_word(kOption<E>, word, {std::begin(kWords<E>), std::end(kWords<E>)});
  }

  E value_ = {};
};

}  // namespace phub

template <class E>
struct fmt::formatter<phub::Choice<E>> : fmt::formatter<std::string_view> {
  auto format(const phub::Choice<E>& choice, format_context& context) const {
    return formatter<std::string_view>::format(choice.word(), context);
  }
};
