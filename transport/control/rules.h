// The options of a job that go together: the features that a job may have, and one table of the
// pairs that are refused. joining.md shows it ("Options that do not go together").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "transport/control/job_spec.h"

namespace phub {

enum class Feature : uint8_t {
  kBsp,
  kSsp,
  kAsync,
  kSlack,
  kNoOptimizer,
  kSgd,  // the only other one without states
  kFold,
  kSumOnly,
  kNoWork,
  kMean,
  kWeights,
  kExclude,
  kSkip,
  kMaxNorm,
  kByKey,      // the optimizer makes steps by norms of whole keys
  kWholeKeys,  // the optimizer makes steps of whole keys
  kUnused,
  kHyper,
  kSchedule,
  kState8,
  kGroups,
  kUngrouped,
  kMinRanks,
  kQuorum,
  kLateDecay,
  kRacks,
  kBranches,
  kShortGradients,
  kCodedGradients,
  kInt32Gradients,
  kScheduledGradients,
  kFactorKeys,
  kRowKeys,
  kLazyKeys,
  kShortResults,
  kDifferences,
  // Features that a spec does not have:
  kInterest,     // ranks write and read some chunks only (interest.h)
  kBelowParent,  // the box is a rack
  kSwitch,       // sums come through a switch
  kHasStandby,   // another box has the same sums, and goes on when this one dies
  kCount
};
inline constexpr size_t kFeatures = static_cast<size_t>(Feature::kCount);
static_assert(kFeatures <= 64);

// A set of them.
class Features {
 public:
  constexpr Features() = default;
  constexpr Features(Feature one) : bits_(uint64_t{1} << static_cast<size_t>(one)) {}
  constexpr Features operator|(Features more) const { return of_bits(bits_ | more.bits_); }
  constexpr Features operator&(Features other) const { return of_bits(bits_ & other.bits_); }
  constexpr Features& operator|=(Features more) { return *this = *this | more; }
  constexpr bool has(Feature one) const { return !(*this & one).empty(); }
  constexpr bool empty() const { return bits_ == 0; }
  // REQUIRES: it is not empty.
  Feature first() const;

 private:
  static constexpr Features of_bits(uint64_t bits) {
    Features all;
    all.bits_ = bits;
    return all;
  }
  uint64_t bits_ = 0;
};
constexpr Features operator|(Feature a, Features b) { return Features(a) | b; }

// A job with one of `of` has none of `without`.
struct Rule {
  Features of, without;
  std::string_view why;  // a sentence about one of `of`
  std::string_view instead = "change one of them";
};
std::span<const Rule> rules();

// Its name in the tables of documents: "consistency ssp".
std::string_view name_of(Feature feature);
// The features that the spec has. A word that validate() refuses is none.
Features features_of(const JobSpec& spec);
// The first rule that refuses this pair, in either order; null if they go together.
const Rule* refused(Feature a, Feature b);

// Throws Error(kInvalid) for the first pair that is refused; the sentence names both options as the
// job has them. `also`: features that the spec does not say.
void check_rules(const JobSpec& spec, Features also = {});

}  // namespace phub
