#include "phub/quotas.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "phub/text_table.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr size_t kMostNamed = 10;

// "3 ranks", "1.50 GiB of memory".
std::string amount(const QuotaField& field, uint64_t value) {
  if (!field.is_bytes) return fmt::format("{} {}", value, field.word);
  return fmt::format("{} of {}", value == 0 ? "0 B" : human_bytes(value), field.word);
}

}  // namespace

void Quotas::check(const Caller& creator, const Quota& quota, const std::string& job,
                   const Quota& needed,
                   const std::function<uint64_t(const Names& running)>& kept) const {
  std::vector<const Held*> theirs;
  Names names{job};  // its own are covered by what it needs
  for (const auto& [of, held] : held_) {
    if (held.creator != creator.id) continue;
    theirs.push_back(&held);
    names.insert(held.name);
  }
  std::ranges::sort(theirs, {}, &Held::name);
  for (const QuotaField& field : kQuotaFields) {
    const uint64_t limit = quota.*field.amount;
    if (limit == Quota::kNone) continue;
    const auto has = [&field](const Held* held) { return held->has.*field.amount; };
    std::ranges::stable_sort(theirs, std::greater(), has);
    uint64_t used = 0;
    std::vector<std::string> by;
    for (const Held* held : theirs) {
      used += has(held);
      if (by.size() < kMostNamed)
        by.push_back(fmt::format("{} {}", held->name, amount(field, has(held))));
    }
    if (theirs.size() > by.size()) by.push_back(fmt::format("{} more", theirs.size() - by.size()));
    if (field.amount == &Quota::checkpoints) {
      const uint64_t of_others = kept(names);
      used += of_others;
      if (of_others > 0) by.push_back("jobs that do not run " + amount(field, of_others));
    }
    const uint64_t free = limit - std::min(limit, used);
    const uint64_t needs = needed.*field.amount;
    if (needs <= free) continue;
    fail(ErrorCode::kFull,
         "the quota of token '{}' is {}, and {} are free{}; job '{}' needs {}: end another job, or "
         "ask for more",
         creator.name, amount(field, limit), amount(field, free),
         by.empty() ? "" : fmt::format(" ({})", fmt::join(by, ", ")), job, amount(field, needs));
  }
}

void Quotas::add(const Job* job, const Caller& creator, const std::string& name, const Quota& has) {
  held_[job] = {creator.id, name, has};
}

}  // namespace phub
