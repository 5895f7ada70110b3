#include "transport/control/rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "transport/control/choices.h"
#include "transport/error.h"
#include "transport/format_schedule.h"
#include "transport/slot_format.h"
#include "transport/text.h"

namespace phub {
namespace {

using enum Feature;

constexpr std::array<std::string_view, kFeatures> kNames = {
    "consistency bsp",
    "consistency ssp",
    "consistency async",
    "slack",
    "optimizer none",
    "optimizer sgd",
    "keys with operations",
    "work sum",
    "work none",
    "reduction mean",
    "weights",
    "on_nonfinite exclude",
    "on_nonfinite skip",
    "max_norm",
    "optimizer lars or lamb",
    "optimizer adafactor or muon",
    "unused skip",
    "hyper",
    "schedule",
    "state_dtype 8bit",
    "groups",
    "no groups",
    "min_ranks",
    "quorum",
    "late_decay",
    "rack_ranks",
    "branches",
    "gradients in bf16 or f16",
    "gradients in a coded format",
    "gradients in int32",
    "gradients in a schedule of formats",
    "factors",
    "rows",
    "lazy",
    "results in bf16 or f16",
    "results as differences",
    "interest",
    "a server with --parent",
    "int32 at a server with --switch",
    "a server with --standby",
};

static_assert(!kNames.back().empty());

constexpr Features kOutOfLockStep = kSsp | kAsync, kPartialWork = kSumOnly | kNoWork;
// They apply a round as a whole.
constexpr Features kGated = kSkip | kMaxNorm | kByKey | kWholeKeys;

constexpr Rule kRules[] = {
    {kBelowParent, kUngrouped, "it sums one group of the ranks, a rack",
     "give it groups, one for each rack, or join the parent itself"},
    {kBelowParent, kOutOfLockStep | kPartialWork | kMinRanks | kBranches | kInterest,
     "it is one of several racks, which take part in every round, and its parent counts racks",
     "change that, or join the parent itself"},
    {kSwitch, kOutOfLockStep | kExclude | kUnused | kGroups | kBranches | kInterest,
     "a switch adds what all ranks send in a round, in any order, and does not tell whose it is",
     "change that, or use another format, or a server without a switch"},
    {kHasStandby,
     kOutOfLockStep | kFold | kGated | kBranches | kInterest | kLazyKeys | kDifferences | kRacks,
     "its standby makes the same steps, with one gradient of every chunk in every round",
     "change that, say saved='no', or use a server without a standby"},
    {kSlack, kBsp | kAsync, "it is for consistency ssp"},
    {kGated | kUnused | kGroups | kDifferences | kRacks | kInterest | kPartialWork, kOutOfLockStep,
     "it needs rounds that all ranks make together, with consistency bsp"},
    {kGated | kUnused | kDifferences | kLazyKeys | kState8, kNoOptimizer | kPartialWork,
     "it is about the steps of the server's optimizer"},
    {kBranches, kPartialWork, "without steps branches do not differ"},
    {kFold,
     kPartialWork | kMean | kExclude | kSkip | kUnused | kHyper | kSchedule | kState8 |
         kShortGradients | kCodedGradients | kInt32Gradients | kScheduledGradients | kFactorKeys |
         kShortResults | kDifferences,
     "it only combines values, words of 32 bits"},
    {kRacks,
     kPartialWork | kBranches | kShortGradients | kCodedGradients | kInt32Gradients |
         kScheduledGradients | kFactorKeys | kRowKeys | kLazyKeys | kDifferences,
     "racks send whole sums in f32, and get whole results"},
    {kScheduledGradients, kOutOfLockStep,
     "its formats go by rounds that all ranks make together, with consistency bsp"},
    {kScheduledGradients, kBranches,
     "its formats go by the job's rounds, which branches take turns in"},
    {kBranches, kSchedule, "each branch has hyperparameters of its own, set while it runs"},
    {kBranches, kDifferences, "another branch comes whole, and not as a difference"},
    {kLazyKeys, kGated, "steps are of single rows, and not of whole rounds"},
    {kState8, kSgd, "it is about the optimizer's states, and this one has none"},
    {kState8, kByKey, "each step reads them twice, and this is not possible yet"},
    {kState8 | kBranches, kWholeKeys, "keys have all of their state at one place, as f32"},
    {kMaxNorm, kWholeKeys, "steps of whole keys are made before the norm of all keys is known"},
    {kState8, kBranches, "branches exchange states as f32"},
    {kState8, kLazyKeys, "a block of states has one scale, and steps of single rows share blocks"},
    {kInterest, kGated | kBranches | kRacks, "ranks take part in some chunks only"},
    {kQuorum, kOutOfLockStep | kPartialWork, "it is about rounds, with consistency bsp"},
    {kQuorum, kGated | kInterest | kSwitch | kRacks | kBelowParent,
     "its rounds go on without ranks that are late"},
    {kQuorum, kBranches | kLazyKeys | kDifferences | kScheduledGradients,
     "a rank that is late skips rounds"},
    {kWeights, kOutOfLockStep | kPartialWork,
     "it counts in the sum of a round that all ranks make together, with consistency bsp"},
    {kWeights, kInterest | kSwitch | kRacks | kBelowParent,
     "the box adds the gradient of each rank itself, and knows the weight of each"},
    {kWeights | kLateDecay, kFold | kInt32Gradients,
     "it multiplies gradients, and these are values or whole numbers that are joined as they are"},
};

Features features_of(const JobSpec& spec, const KeySpec& key) {
  const Features lazy = key.lazy ? Features(kLazyKeys) : Features();
  if (is_rows(key)) return lazy | kRowKeys | (key.rank_limit > 0 ? kFactorKeys : Features());
  if (is_factors(key)) return lazy | kFactorKeys;
  const std::string& format = gradient_format(spec, key);
  if (is_schedule(format)) return lazy | kCodedGradients | kScheduledGradients;
  const SlotFormat* const known = find_slot_format(format);
  if (known == nullptr || format == "f32") return lazy;
  if (format == kInt32) return lazy | kInt32Gradients;
  return lazy | (known->is_plain() ? kShortGradients : kCodedGradients);
}

Features features_of_results(const JobSpec& spec) {
  const SlotFormat* const format = find_slot_format(spec.parameter_dtype);
  if (format == nullptr || spec.parameter_dtype == "f32") return {};
  return format->is_plain() ? kShortResults : kDifferences;
}

// As the job has it. REQUIRES: it has it, or the spec does not say.
std::string words_of(const JobSpec& spec, Feature feature) {
  const auto word = [](std::string_view option, std::string_view value) {
    return fmt::format("{} '{}'", option, printable(value));
  };
  switch (feature) {
    case kBsp:
    case kSsp:
    case kAsync:
      return word("consistency", spec.consistency.word());
    case kSlack:
      return fmt::format("slack {}", spec.slack);
    case kNoOptimizer:
    case kSgd:
    case kByKey:
    case kWholeKeys:
      return word("optimizer", spec.optimizer);
    case kSumOnly:
    case kNoWork:
      return word("work", spec.work.word());
    case kMean:
      return word("reduction", spec.reduction.word());
    case kExclude:
    case kSkip:
      return word("on_nonfinite", spec.on_nonfinite.word());
    case kUnused:
      return word("unused", spec.unused.word());
    case kState8:
      return word("state_dtype", spec.state_dtype.word());
    case kGroups:
      return word("groups", spec.groups);
    case kQuorum:
      return fmt::format("quorum {}", spec.quorum);
    case kWeights:
      return word("weights", spec.weights.word());
    case kLateDecay:
      return fmt::format("late_decay {}", spec.late_decay);
    case kShortResults:
    case kDifferences:
      return word("parameter_dtype", spec.parameter_dtype);
    case kShortGradients:
    case kCodedGradients:
    case kInt32Gradients:
    case kScheduledGradients:
    case kFactorKeys:
    case kRowKeys:
    case kLazyKeys: {
      const auto key = std::ranges::find_if(
          spec.keys, [&](const KeySpec& each) { return features_of(spec, each).has(feature); });
      const bool by_job = key->format.empty() && feature != kLazyKeys;
      if (by_job) return word("gradient_dtype", spec.gradient_dtype);
      return fmt::format("keys[{}].{}", key - spec.keys.begin(),
                         feature == kLazyKeys ? "lazy" : word("format", key->format));
    }
    default:
      return std::string(name_of(feature));
  }
}

}  // namespace

Feature Features::first() const { return static_cast<Feature>(std::countr_zero(bits_)); }

std::string_view name_of(Feature feature) { return kNames[static_cast<size_t>(feature)]; }

Features features_of(const JobSpec& spec) {
  Features found = features_of_results(spec);
  const auto add = [&found](bool has, Feature feature) {
    if (has) found |= feature;
  };
  bool by_job = false;
  for (const KeySpec& key : spec.keys) {
    if (key.format.empty() && !key.lazy && std::exchange(by_job, true)) continue;
    found |= features_of(spec, key);
  }
  add(spec.consistency == Consistency::kBsp, kBsp);
  add(spec.consistency == Consistency::kSsp, kSsp);
  add(spec.consistency == Consistency::kAsync, kAsync);
  add(spec.slack > 0, kSlack);
  add(spec.optimizer == "none", kNoOptimizer);
  add(spec.optimizer == "sgd", kSgd);
  add(folds(spec), kFold);
  add(spec.work == Work::kSumOnly, kSumOnly);
  add(spec.work == Work::kNone, kNoWork);
  add(spec.reduction == Reduction::kMean, kMean);
  add(spec.weights == Weights::kYes, kWeights);
  add(spec.on_nonfinite == OnNonFinite::kExclude, kExclude);
  add(spec.on_nonfinite == OnNonFinite::kSkip, kSkip);
  add(clips(spec), kMaxNorm);
  add(adapts_by_key(spec), kByKey);
  add(steps_whole_keys(spec), kWholeKeys);
  add(spec.unused == Unused::kSkip, kUnused);
  add(!spec.hyper.empty(), kHyper);
  add(!spec.schedule.empty(), kSchedule);
  add(spec.state_dtype == StateFormat::k8Bit, kState8);
  found |= spec.groups.empty() ? kUngrouped : kGroups;
  add(spec.min_ranks > 0, kMinRanks);
  add(spec.quorum > 0, kQuorum);
  add(spec.late_decay < 1, kLateDecay);
  add(!spec.rack_ranks.empty(), kRacks);
  add(spec.branches > 0, kBranches);
  return found;
}

std::span<const Rule> rules() { return kRules; }

const Rule* refused(Feature a, Feature b) {
  const auto rule = std::ranges::find_if(kRules, [a, b](const Rule& each) {
    return (each.of.has(a) && each.without.has(b)) || (each.of.has(b) && each.without.has(a));
  });
  return rule == std::end(kRules) ? nullptr : rule;
}

void check_rules(const JobSpec& spec, Features also) {
  const Features all = features_of(spec) | also;
  for (const Rule& rule : kRules) {
    const Features of = all & rule.of, without = all & rule.without;
    if (of.empty() || without.empty()) continue;
    fail(ErrorCode::kInvalid, "{}: {}, and job '{}' has {}; {}", words_of(spec, of.first()),
         rule.why, printable(spec.name), words_of(spec, without.first()), rule.instead);
  }
}

}  // namespace phub
