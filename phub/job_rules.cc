#include "phub/job_rules.h"

#include <algorithm>

#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "transport/error.h"

namespace phub {
namespace {

// For the enums of kernels/, which parse their own words.
template <class E>
E kernel_choice(std::string_view field, std::string_view word,
                std::optional<E> (*parse)(std::string_view), E last) {
  if (const std::optional<E> value = parse(word)) return *value;
  std::vector<std::string_view> words;
  for (size_t i = 0; i <= static_cast<size_t>(last); ++i) {
    const std::string_view known = kernels::name_of(static_cast<E>(i));
    if (parse(known)) words.push_back(known);
  }
  refuse_word(field, word, words);
}

static_assert(std::ranges::equal(kernels::kFormats, kSlotFormats, {}, &kernels::Format::name,
                                 &SlotFormat::name),
              "dtype_at()");

constexpr auto kLastType = static_cast<kernels::DType>(kernels::kFormats.size() - 1);

std::optional<kernels::DType> parse_result_format(std::string_view name) {
  const SlotFormat* format = find_slot_format(name);
  return format && format->for_results() ? kernels::parse_format(name) : std::nullopt;
}

}  // namespace

JobRules rules_of(const JobSpec& spec) {
  const kernels::DType parameters =
      kernel_choice("parameter_dtype", spec.parameter_dtype, parse_result_format, kLastType);
  const bool plain = kernels::is_plain(parameters);
  const auto optimizer = kernel_choice("optimizer", spec.optimizer, kernels::parse_optimizer,
                                       kernels::Optimizer::kFold);
  PHUB_CHECK(kernels::adapts(optimizer) == adapts_by_key(spec) &&  // which knows no kernels
             kernels::takes_whole_keys(optimizer) == steps_whole_keys(spec));
  return {.optimizer = optimizer,
          .parameter_dtype = plain ? parameters : kernels::DType::kF32,
          .difference = plain ? std::nullopt : std::optional(parameters),
          .consistency = spec.consistency,
          .reduction = spec.reduction,
          .work = spec.work,
          .initial = spec.initial,
          .on_loss = spec.on_loss,
          .on_nonfinite = spec.on_nonfinite,
          .unused = spec.unused,
          .state8 = spec.state_dtype == StateFormat::k8Bit,
          .gated = is_gated(spec),
          .mirrors = spec.mirrors,
          .quorum = spec.quorum,
          .late_decay = static_cast<float>(spec.late_decay),
          .weights = spec.weights == Weights::kYes};
}

kernels::Fold fold_of(const KeySpec& key) {
  if (key.operation.empty()) return {};
  if (const auto fold = kernels::parse_fold(value_type_of(key), key.operation)) return *fold;
  fail(ErrorCode::kInvalid, "key '{}': operation '{}' of '{}' is unknown", key.name,
       printable(key.operation), printable(key.value_type));
}

kernels::DType gradient_dtype(const JobSpec& spec, const KeySpec& key) {
  if (is_compact(key)) return kernels::DType::kF32;
  const std::string_view field = key.format.empty() ? "gradient_dtype" : "format";
  const std::string& format = gradient_format(spec, key);
  if (is_schedule(format)) return dtype_at(FormatSchedule::parse(field, format), 1);
  return kernel_choice(field, format, kernels::parse_format, kLastType);
}

}  // namespace phub
