#include "phub/job/shard_words.h"

#include <algorithm>
#include <array>

namespace phub {
namespace {

struct Word {
  CoreReport::Type report;
  ShardSays word;
};
constexpr std::array kWords = {
    Word{CoreReport::kHeld, ShardSays::kHeld},
    Word{CoreReport::kCommitted, ShardSays::kCommitted},
    Word{CoreReport::kProbed, ShardSays::kProbed},
    Word{CoreReport::kDetached, ShardSays::kDetached},
    Word{CoreReport::kAttached, ShardSays::kAttached},
    Word{CoreReport::kRemoved, ShardSays::kRemoved},
    Word{CoreReport::kBroken, ShardSays::kBroken},
    Word{CoreReport::kViolation, ShardSays::kViolation},
    Word{CoreReport::kNonFinite, ShardSays::kNonFinite},
    Word{CoreReport::kExcluded, ShardSays::kExcluded},
    Word{CoreReport::kFailed, ShardSays::kFailed},
};

}  // namespace

std::optional<ShardSays> word_of(CoreReport::Type report) {
  const auto* const at = std::ranges::find(kWords, report, &Word::report);
  if (at == kWords.end()) return std::nullopt;
  return at->word;
}

std::optional<CoreReport::Type> report_of(ShardSays word) {
  const auto* const at = std::ranges::find(kWords, word, &Word::word);
  if (at == kWords.end()) return std::nullopt;
  return at->report;
}

}  // namespace phub
