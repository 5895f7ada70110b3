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
                   const Needs& needed, const std::function<BytesOfJobs()>& kept) const {
  for (const QuotaField& field : kQuotaFields) {
    const uint64_t limit = quota.*field.amount;
    if (limit == Quota::kNone) continue;
    const bool on_disk = field.amount == &Quota::checkpoints;
    BytesOfJobs has = on_disk ? kept() : BytesOfJobs();
    uint64_t needs = std::max(needed.amounts.*field.amount, has[job]);
    has.erase(job);  // those of an earlier job of this name stay until new ones take their places
    for (const auto& [of, held] : held_) {
      if (held.creator != creator.id) continue;
      has[held.name] = std::max(has[held.name], held.has.amounts.*field.amount);
    }
    std::vector<std::pair<uint64_t, std::string>> by;
    uint64_t used = 0;
    for (const auto& [name, value] : has) {
      used += value;
      if (value > 0) by.emplace_back(value, name);
    }
    if (field.amount == &Quota::cores) {
      std::set<uint32_t> cpus = cpus_of(creator.id);
      used = cpus.size();
      cpus.insert(needed.cpus.begin(), needed.cpus.end());
      needs = cpus.size() - used;
    }
    const uint64_t free = limit - std::min(limit, used);
    if (needs <= free) continue;
    std::ranges::stable_sort(by, std::greater(), &std::pair<uint64_t, std::string>::first);
    std::vector<std::string> named;
    for (const auto& [value, name] : by) {
      if (named.size() == kMostNamed) break;
      named.push_back(fmt::format("{} {}", name, amount(field, value)));
    }
    if (by.size() > named.size()) named.push_back(fmt::format("{} more", by.size() - named.size()));
    fail(ErrorCode::kFull,
         "the quota of token '{}' is {}, and {} are free{}; job '{}' needs {}: {}, or ask for more",
         creator.name, amount(field, limit), amount(field, free),
         named.empty() ? "" : fmt::format(" ({})", fmt::join(named, ", ")), job,
         amount(field, needs),
         on_disk ? "have the checkpoints of ended jobs removed" : "end another job");
  }
}

void Quotas::add(const Job* job, const std::string& creator, const std::string& name, Needs has) {
  held_[job] = {creator, name, std::move(has)};
}

std::set<uint32_t> Quotas::cpus_of(const std::string& creator) const {
  std::set<uint32_t> cpus;
  for (const auto& [job, held] : held_) {
    if (held.creator == creator) cpus.insert(held.has.cpus.begin(), held.has.cpus.end());
  }
  return cpus;
}

}  // namespace phub
