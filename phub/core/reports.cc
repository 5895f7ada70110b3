#include "phub/core/reports.h"

#include <algorithm>

#include "transport/error.h"

namespace phub {
namespace {

bool is_of_connection(CoreReport::Type type) {
  return type == CoreReport::kBroken || type == CoreReport::kViolation;
}

}  // namespace

Reports::Reports(uint32_t core, CoreJob* job, const ChunkTable& table)
    : core_(core), job_(job), table_(table), most_exclusions_(most_exclusions(table.max_ranks())) {
  reports_.reserve(most(table.max_ranks()));
}

CoreReport& Reports::add(CoreReport::Type type, uint32_t rank, uint32_t index) {
  const bool of_chunk = index != kNoChunk;
  const CoreReport report{
      .type = type,
      .core = core_,
      .job = job_,
      .rank = rank,
      .incarnation = rank < table_.max_ranks() ? table_.rank(rank).incarnation : 0,
      .chunk = of_chunk ? table_[index].id : 0,
      .round = of_chunk ? table_[index].round : 0};
  if (type == CoreReport::kQuorum) {
    std::erase_if(reports_, [](const CoreReport& r) { return r.type == CoreReport::kQuorum; });
  }
  if (is_of_connection(type)) {  // replaces that of an earlier connection of the rank
    const auto older = std::find_if(reports_.begin(), reports_.end(), [&](const CoreReport& r) {
      return r.rank == rank && is_of_connection(r.type);
    });
    if (older != reports_.end()) return *older = report;
  }
  if (type == CoreReport::kExcluded) ++exclusions_;
  PHUB_CHECK(reports_.size() < reports_.capacity());
  return reports_.emplace_back(report);
}

bool Reports::next(CoreReport& out) {
  if (reports_.empty()) return false;
  out = reports_.front();
  if (out.type == CoreReport::kExcluded) --exclusions_;
  reports_.erase(reports_.begin());
  return true;
}

void Reports::withdraw(size_t size) {
  exclusions_ -= reports_.size() - size;
  reports_.resize(size);
}

}  // namespace phub
