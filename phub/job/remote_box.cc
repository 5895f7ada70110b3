#include "phub/job/remote_box.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace phub {
namespace {

// Each rank may come once, and each chunk once, ascending: otherwise the work could be the product
// of the two lists' lengths, not their sum.
void check_last_rounds(std::span<const ShardRounds> all, const Plan& plan,
                       const Boundary& boundary) {
  std::set<uint32_t> ranks;
  for (const ShardRounds& rounds : all) {
    if (!ranks.insert(rounds.rank).second) refuse_report("the last rounds of a rank come twice");
    const auto lost = std::ranges::find(boundary.lost, rounds.rank, &Boundary::Lost::rank);
    if (lost == boundary.lost.end()) refuse_report("a rank that is not lost");
    uint64_t next = 0;
    for (const ChunkRange& range : rounds.rounds) {
      const bool is_behind = range.first >= next && range.last >= range.first;
      if (!is_behind || range.last >= plan.chunks.size()) refuse_report("a range of chunks");
      next = uint64_t{range.last} + 1;
    }
  }
}

}  // namespace

void refuse_report(std::string_view what) {
  fail(ErrorCode::kInvalid, "mail: a report does not fit its job: {}", what);
}

// --- one box -------------------------------------------------------------------------------------

RemoteBox::RemoteBox(const Plan& plan, uint32_t index, const ShardBox& serves)
    : shard(serves.id),
      name(serves.about.name),
      box(index),
      first_core(first_core_of(plan, index)),
      cores(first_core_of(plan, index + 1) - first_core),
      first_queue(first_queue_of(plan, index)),
      queues(first_queue_of(plan, index + 1) - first_queue) {}

void RemoteBox::owes(CoreReport::Type type, uint32_t rank, uint64_t from_round) {
  for (uint32_t core = 0; core < cores; ++core) {
    owed[{type, rank, core}] = {.from_round = from_round};
  }
}

uint32_t RemoteBox::owing(CoreReport::Type type) const {
  return static_cast<uint32_t>(std::ranges::count(
      owed, type, [](const auto& report) { return std::get<CoreReport::Type>(report.first); }));
}

std::span<const uint32_t> RemoteBox::close(uint64_t round, const Plan& plan) {
  if (round <= closed_round) refuse_report("a round that is closed");
  closed_round = round;
  if (!chunks.empty()) return chunks;
  for (uint32_t id = 0; id < plan.chunks.size(); ++id) {
    if (plan.chunks[id].queue - first_queue < queues) chunks.push_back(id);
  }
  return chunks;
}

void RemoteBox::take_last_rounds(std::span<const ShardRounds> all, const Plan& plan,
                                 Boundary& boundary) {
  if (std::exchange(told_rounds, true)) refuse_report("last rounds that are known");
  check_last_rounds(all, plan, boundary);
  for (const ShardRounds& rounds : all) {
    const auto lost = std::ranges::find(boundary.lost, rounds.rank, &Boundary::Lost::rank);
    for (const ChunkRange& range : rounds.rounds) {
      for (uint32_t c = range.first; c <= range.last; ++c) {
        const uint32_t queue = plan.chunks[c].queue - first_queue;
        if (queue < queues) lost->last_rounds[c] = range.round;
      }
    }
  }
}

// --- a question ----------------------------------------------------------------------------------

BoxQuestion::BoxQuestion(std::span<const RemoteBox> boxes, Offer* offer, Done done,
                         uint64_t limit_ms)
    : limit_ms_(limit_ms), offer_(offer), done_(std::move(done)) {
  for (const RemoteBox& box : boxes) awaited_[box.shard] = 0;
}

void BoxQuestion::answered(const RemoteBox& box, const ShardReport& report) {
  if (!awaited_.contains(box.shard)) return;
  if (report.refused && !failed_) {
    failed_.emplace(report.code, fmt::format("{}: {}", box.name, report.text));
  }
  if (!report.refused && offer_ != nullptr) {
    if (report.queues.size() != box.queues || report.tls != offer_->tls) refuse_report("an offer");
    std::ranges::copy(report.queues, offer_->queues.begin() + box.first_queue);
  }
  awaited_.erase(box.shard);
  if (!awaited_.empty()) return;
  const Done done = std::exchange(done_, nullptr);
  const std::optional<Error> failed = failed_;
  done(failed);
}

}  // namespace phub
