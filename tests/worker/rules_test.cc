// Every pair of options of a job: it is refused with the sentence of its rule, or a job that has
// both trains, to the bits of one process.
#include "transport/control/rules.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"

namespace phub::testing {
namespace rules_test {

using enum Feature;

KeySpec matrix(const std::string& name, const std::string& format) {
  KeySpec key{.name = name, .elements = 60, .shape = {10, 6}, .format = format, .tile_rows = 10};
  (is_rows(key) ? key.rows_limit : key.rank_limit) = 4;
  return key;
}

// What gives a job the feature; null: the spec cannot say it.
std::function<void(JobSpec&)> switched_on(Feature feature) {
  const auto add = [](const std::string& name, const std::string& format, bool lazy = false) {
    return [=](JobSpec& spec) {
      KeySpec& key = spec.keys.emplace_back(matrix(name, format));
      key.lazy = lazy;
    };
  };
  switch (feature) {
    case kBsp:
      return [](JobSpec& spec) { spec.consistency = "bsp"; };
    case kSsp:
      return [](JobSpec& spec) { spec.consistency = "ssp"; };
    case kAsync:
      return [](JobSpec& spec) { spec.consistency = "async"; };
    case kSlack:
      return [](JobSpec& spec) { spec.slack = 3; };
    case kNoOptimizer:
      return [](JobSpec& spec) { spec.optimizer = "none"; };
    case kSgd:
      return [](JobSpec& spec) { spec.optimizer = "sgd"; };
    case kFold:
      return [](JobSpec& spec) { spec.optimizer = kFoldOptimizer; };  // and operations, below
    case kSumOnly:
      return [](JobSpec& spec) { spec.work = "sum"; };
    case kNoWork:
      return [](JobSpec& spec) { spec.work = "none"; };
    case kMean:
      return [](JobSpec& spec) { spec.reduction = "mean"; };
    case kWeights:
      return [](JobSpec& spec) { spec.weights = "yes"; };
    case kExclude:
      return [](JobSpec& spec) { spec.on_nonfinite = "exclude"; };
    case kSkip:
      return [](JobSpec& spec) { spec.on_nonfinite = "skip"; };
    case kByKey:
      return [](JobSpec& spec) { spec.optimizer = "lars"; };
    case kWholeKeys:
      return [](JobSpec& spec) {
        spec.optimizer = "adafactor";
        spec.keys[0].shape = {20, 10};
      };
    case kMaxNorm:
      return [](JobSpec& spec) { spec.hyper["max_norm"] = 2; };
    case kUnused:
      return [](JobSpec& spec) { spec.unused = "skip"; };
    case kHyper:
      return [](JobSpec& spec) { spec.hyper["grad_scale"] = 2; };
    case kSchedule:
      return [](JobSpec& spec) { spec.schedule = {{.round = 2, .values = {{"grad_scale", 4}}}}; };
    case kState8:
      return [](JobSpec& spec) { spec.state_dtype = "8bit"; };
    case kGroups:
      return [](JobSpec& spec) { spec.groups = spec.world_size == 1 ? "1" : "1,1"; };
    case kUngrouped:
      return [](JobSpec& spec) { spec.groups.clear(); };
    case kMinRanks:
      return [](JobSpec& spec) { spec.min_ranks = 1; };
    case kQuorum:  // nobody is late
      return [](JobSpec& spec) { spec.quorum = spec.world_size, spec.grace_ms = 60'000; };
    case kLateDecay:
      return [](JobSpec& spec) {
        spec.quorum = spec.world_size, spec.grace_ms = 60'000, spec.late_decay = 0.5;
      };
    case kRacks:
      return [](JobSpec& spec) { spec.rack_ranks.assign(spec.world_size, 2); };
    case kBranches:
      return [](JobSpec& spec) { spec.branches = 1; };
    case kShortGradients:
      return [](JobSpec& spec) { spec.gradient_dtype = "bf16"; };
    case kCodedGradients:
      return [](JobSpec& spec) { spec.keys[0].format = "int8"; };
    case kInt32Gradients:
      return [](JobSpec& spec) { spec.keys[1].format = "int32"; };
    case kScheduledGradients:
      return [](JobSpec& spec) { spec.keys[2].format = "f32*2,int8"; };
    case kFactorKeys:
      return add("factors", "factors");
    case kRowKeys:
      return add("rows", "rows");
    case kLazyKeys:
      return add("lazy", "rows", true);
    case kShortResults:
      return [](JobSpec& spec) { spec.parameter_dtype = "f16"; };
    case kDifferences:
      return [](JobSpec& spec) { spec.parameter_dtype = "int8"; };
    case kInterest:
    case kBelowParent:
    case kSwitch:
    case kHasStandby:
    case kCount:
      return nullptr;
  }
  return nullptr;
}

// Of one rank where rounds are not of all, so that its steps are those of one process.
JobSpec job_with(Feature a, Feature b) {
  const bool alone = Features(kSsp | kAsync | kSlack).has(a) || (kSsp | kAsync | kSlack).has(b);
  JobSpec spec = grouped_spec(fmt::format("{}-{}", static_cast<int>(a), static_cast<int>(b)),
                              alone ? 1 : 2, "");
  spec.keys = {
      {.name = "a", .elements = 200}, {.name = "b", .elements = 7}, {.name = "c", .elements = 96}};
  spec.optimizer = "momentum";
  for (const Feature feature : {a, b}) switched_on(feature)(spec);
  if (spec.slack > 0 && a != kBsp && b != kBsp && spec.consistency == "bsp")
    spec.consistency = "ssp";
  for (KeySpec& key : spec.keys) {
    if (folds(spec)) key.operation = "add";
  }
  return spec;
}

void train_as_alone(Box& box, JobSpec spec) {
  GroupedTraining run{.spec = std::move(spec), .has_nulls = true, .rounds = 4};
  JobSpec same = run.spec;  // for one process
  const bool adds_up = same.consistency != "bsp" && same.optimizer == "none";
  if (same.consistency != "bsp") same.unused = "skip";  // a null is no step
  same.consistency = "bsp";
  same.slack = 0;
  if (adds_up) {
    same.optimizer = "sgd";
    same.hyper["lr"] = -1;
  }
  const auto seen = train(run, [&](uint32_t) { return box.options(run.spec); });
  if (run.spec.work != "all") return;  // all results came, and nothing is in them
  const bool has_rows = std::ranges::any_of(
      run.spec.keys, [](const KeySpec& key) { return is_rows(key) && !key.lazy; });
  if (has_rows && run.spec.consistency != "bsp")
    return;  // a null of rows is a step in rounds alone
  const std::vector<Results> want = alone(run, same, box.log(run.spec.name));
  for (const auto& of_rank : seen) EXPECT_EQ(of_rank, want);
}

bool are_words_of_one_option(Feature a, Feature b) {
  for (const Features one :
       {kBsp | kSsp | kAsync, kNoOptimizer | kSgd | kFold | kByKey | kWholeKeys, kSumOnly | kNoWork,
        kExclude | kSkip, kGroups | kUngrouped, kShortResults | kDifferences}) {
    if (one.has(a) && one.has(b)) return true;
  }
  return false;
}

// Through what one of the two needs: slack needs ssp, which refuses the other.
bool any_refused(Features all) {
  for (size_t i = 0; i < kFeatures; ++i) {
    for (size_t j = 0; j < i; ++j) {
      const auto a = static_cast<Feature>(i), b = static_cast<Feature>(j);
      if (all.has(a) && all.has(b) && refused(a, b)) return true;
    }
  }
  return false;
}

TEST(Rules, APairIsRefusedOrTrains) {
  Box box(2);
  size_t refusals = 0, trained = 0;
  for (size_t i = 0; i < kFeatures; ++i) {
    for (size_t j = 0; j < i; ++j) {
      const auto a = static_cast<Feature>(i), b = static_cast<Feature>(j);
      if (!switched_on(a) || !switched_on(b)) continue;
      SCOPED_TRACE(fmt::format("{} with {}", name_of(a), name_of(b)));
      const JobSpec spec = job_with(a, b);
      const Features found = features_of(spec);
      if (are_words_of_one_option(a, b)) continue;
      ASSERT_TRUE(found.has(a) && found.has(b));
      if (const Rule* rule = refused(a, b)) {
        expect_error(ErrorCode::kInvalid, std::string(rule->why), [&] { check_rules(spec); });
        EXPECT_THROW(validate(spec), Error);
        ++refusals;
      } else if (a != kRacks && b != kRacks && !any_refused(found)) {  // racks are boxes
        train_as_alone(box, spec);
        ++trained;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
  fmt::print("{} pairs refused, {} trained\n", refusals, trained);
}

// What a server or a rank adds to a spec.
TEST(Rules, AServerRefusesWhatItsRackOrSwitchOrStandbyCannotDo) {
  for (const Feature here : {kInterest, kBelowParent, kSwitch, kHasStandby}) {
    for (size_t i = 0; i < kFeatures; ++i) {
      const auto other = static_cast<Feature>(i);
      const Rule* const rule = refused(here, other);
      if (!rule || !switched_on(other)) continue;
      JobSpec spec = job_with(other, other);
      if (here == kBelowParent && other != kUngrouped) spec.groups = "1,1";
      SCOPED_TRACE(fmt::format("{} with {}", name_of(here), name_of(other)));
      expect_error(ErrorCode::kInvalid, std::string(rule->why), [&] { check_rules(spec, here); });
    }
  }
  EXPECT_NE(refused(kInterest, kBelowParent), nullptr);
  EXPECT_NE(refused(kSwitch, kInterest), nullptr);
}

}  // namespace rules_test
}  // namespace phub::testing
