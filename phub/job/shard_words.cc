#include "phub/job/shard_words.h"

#include <algorithm>
#include <array>

namespace phub {
namespace {

struct ReportWord {
  CoreReport::Type report;
  ShardSays word;
};
constexpr std::array kReportWords = {
    ReportWord{CoreReport::kHeld, ShardSays::kHeld},
    ReportWord{CoreReport::kCommitted, ShardSays::kCommitted},
    ReportWord{CoreReport::kProbed, ShardSays::kProbed},
    ReportWord{CoreReport::kDetached, ShardSays::kDetached},
    ReportWord{CoreReport::kAttached, ShardSays::kAttached},
    ReportWord{CoreReport::kRemoved, ShardSays::kRemoved},
    ReportWord{CoreReport::kSnapped, ShardSays::kSnapped},
    ReportWord{CoreReport::kBroken, ShardSays::kBroken},
    ReportWord{CoreReport::kViolation, ShardSays::kViolation},
    ReportWord{CoreReport::kNonFinite, ShardSays::kNonFinite},
    ReportWord{CoreReport::kExcluded, ShardSays::kExcluded},
    ReportWord{CoreReport::kFailed, ShardSays::kFailed},
    ReportWord{CoreReport::kClosed, ShardSays::kClosed},
    ReportWord{CoreReport::kGotState, ShardSays::kGotState},
    ReportWord{CoreReport::kSetState, ShardSays::kSetState},
};

}  // namespace

std::optional<ShardSays> word_of(CoreReport::Type report) {
  const auto* const at = std::ranges::find(kReportWords, report, &ReportWord::report);
  if (at == kReportWords.end()) return std::nullopt;
  return at->word;
}

std::optional<CoreReport::Type> report_of(ShardSays word) {
  const auto* const at = std::ranges::find(kReportWords, word, &ReportWord::word);
  if (at == kReportWords.end()) return std::nullopt;
  return at->report;
}

}  // namespace phub
