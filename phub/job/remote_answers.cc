// RemoteParts: what other boxes report, and which of them have not answered in time.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "phub/job/remote_parts.h"
#include "phub/job/shard_words.h"
#include "transport/control/shard_fields.h"

namespace phub {
namespace {

// Whether a core sends the report only when it is asked.
bool is_answer(CoreReport::Type type) {
  switch (type) {
    case CoreReport::kRemoved:
    case CoreReport::kHeld:
    case CoreReport::kCommitted:
    case CoreReport::kProbed:
    case CoreReport::kDetached:
    case CoreReport::kAttached:
    case CoreReport::kSnapped:
    case CoreReport::kGotState:
    case CoreReport::kSetState:
      return true;
    default:
      return false;
  }
}

bool is_about_rank(CoreReport::Type type) {
  return type == CoreReport::kDetached || type == CoreReport::kAttached;
}

void take_probe(const ShardProbe& said, Probe& probe) {
  if (said.arrivals.size() != probe.arrivals.size() ||
      said.waited_for.size() != probe.waited_for.size() ||
      said.queues.size() != probe.queues.size()) {
    refuse_report("the sizes of a probe");
  }
  probe.chunks_completed = said.chunks_completed;
  probe.endpoint = said.endpoint;
  probe.arrivals = said.arrivals;
  probe.waited_for = said.waited_for;
  std::ranges::fill(probe.lacks, Lack());
  for (const ShardLack& lack : said.lacks) {
    if (lack.rank >= probe.lacks.size()) refuse_report("a rank");
    probe.lacks[lack.rank] = {.chunks = lack.chunks, .chunk = lack.chunk, .round = lack.round};
  }
  for (size_t q = 0; q < said.queues.size(); ++q) {
    const ShardQueueCounters& queue = said.queues[q];
    probe.queues[q] = {queue.chunks, queue.bytes_in, queue.bytes_out};
  }
}

}  // namespace

std::span<const uint32_t> RemoteParts::close_round(uint64_t shard, uint64_t round) {
  RemoteBox& part = part_of_shard(shard);
  if (round <= decided_) refuse_report("a round that is closed");
  return part.close(round, plan_);
}

std::optional<CoreReport> RemoteParts::take(uint64_t shard, const ShardReport& report,
                                            const ProbeOf& probe_of, Boundary& boundary) {
  const auto part = std::ranges::find(parts_, shard, &RemoteBox::shard);
  if (part == parts_.end()) return std::nullopt;
  if (being_made() && report.kind != ShardSays::kMade) refuse_report("it is being made");
  if (report.kind == ShardSays::kActive) active_ = true;
  if (report.kind == ShardSays::kMade) making_.answered(*part, report);
  if (report.kind == ShardSays::kOffered) {
    const auto offer = offers_.find({report.rank, report.incarnation});
    if (offer != offers_.end()) offer->second.answered(*part, report);
  }
  for (Shared* shared : {&keys_, &branch_}) {
    if (report.kind != ShardSays::kStateThere || report.state != shared->what.number) continue;
    shared->question.answered(*part, report);
  }
  const std::optional<CoreReport::Type> type = report_of(report.kind);
  if (!type || type == CoreReport::kFailed) return std::nullopt;
  if (report.core >= part->cores) refuse_report("a core");
  if (report.chunk >= plan_.chunks.size()) refuse_report("a chunk");
  if (report.violation > CoreReport::kParticipants) refuse_report("a violation");
  const uint32_t core = part->first_core + report.core;
  const uint32_t whose = is_about_rank(*type) ? report.rank : 0;
  if (is_answer(*type) && part->owed.erase({*type, whose, report.core}) == 0) {
    refuse_report("nobody asked this core, or it has answered already");
  }
  const bool is_snapped = type == CoreReport::kSnapped;
  if (is_snapped || type == CoreReport::kGotState) {
    const CopyPlace what{.round = is_snapped ? report.round - 1 : 0,
                         .state = is_snapped ? 0 : keys_.what.number};
    if (!moves_.is_here(part->box, what)) refuse_report("what its cores copied has not come");
  }
  if (type == CoreReport::kProbed) {
    if (report.probe.empty()) refuse_report("a probe without an answer");
    take_probe(report.probe.front(), probe_of(core));
    probe_of(core).min_round = report.min_round;
  }
  if (!report.last_rounds.empty()) {
    if (type != CoreReport::kCommitted) refuse_report("last rounds without a boundary");
    part->take_last_rounds(report.last_rounds, plan_, boundary);
  }
  CoreReport out;
  out.type = *type;
  out.violation = static_cast<CoreReport::Violation>(report.violation);
  out.core = core;
  out.rank = report.rank;
  out.incarnation = report.incarnation;
  out.chunk = report.chunk;
  out.said = report.said;
  out.round = report.round;
  out.started = report.started;
  out.min_round = report.min_round;
  out.lowest = report.lowest;
  return out;
}

template <typename Visit>
void RemoteParts::for_each_question(Visit visit) {
  visit(making_, "to make its part");
  for (auto& [of, question] : offers_) visit(question, "for connections of a rank");
  visit(keys_.question, "for the state of keys");
  visit(branch_.question, "for a branch");
}

std::optional<RemoteParts::Late> RemoteParts::late(uint64_t now_ms, uint64_t completed_round) {
  std::optional<Late> found;
  const auto late_by = [&](uint64_t shard, uint64_t& since, uint64_t limit_ms) -> uint64_t {
    if (since == 0) since = now_ms;
    const uint64_t waited = now_ms - since;
    return waited > limit_ms && shards_.has(shard) ? waited : 0;
  };
  const auto text = [](uint64_t waited, std::string_view what) {
    return fmt::format("it sends mail, but has not answered for {} ms: it was asked {}", waited,
                       what);
  };
  for_each_question([&](BoxQuestion& question, std::string_view what) {
    for (auto& [shard, since] : question.awaited()) {
      const uint64_t waited = late_by(shard, since, question.limit_ms());
      if (waited > 0) found = {shard, text(waited, what)};
    }
  });
  for (RemoteBox& part : parts_) {
    for (auto& [report, owed] : part.owed) {
      if (owed.from_round > completed_round) continue;
      const uint64_t waited = late_by(part.shard, owed.since_ms, kAnswerMs);
      if (waited == 0) continue;
      const std::string_view word = word_of(*word_of(std::get<CoreReport::Type>(report)));
      const uint32_t core = std::get<2>(report);
      found = {part.shard, text(waited, fmt::format("for '{}' of its core {}", word, core))};
    }
  }
  return found;
}

void RemoteParts::moved(uint64_t shard) {
  for_each_question([shard](BoxQuestion& question, std::string_view) {
    if (const auto at = question.awaited().find(shard); at != question.awaited().end())
      at->second = 0;
  });
  for (RemoteBox& part : parts_) {
    if (part.shard != shard) continue;
    for (auto& [report, owed] : part.owed) {
      const auto type = std::get<CoreReport::Type>(report);
      if (type == CoreReport::kSnapped || type == CoreReport::kGotState) owed.since_ms = 0;
    }
  }
}

std::optional<RemoteParts::Lost> RemoteParts::lose(uint64_t shard) {
  const auto part = std::ranges::find(parts_, shard, &RemoteBox::shard);
  if (part == parts_.end()) return std::nullopt;
  const Lost lost{part->name, part->owing(CoreReport::kCommitted)};
  part->owed.clear();
  ShardReport gone{
      .refused = true, .code = ErrorCode::kUnavailable, .text = std::string(kServesNoMore)};
  making_.answered(*part, gone);
  for (auto& [of, question] : offers_) question.answered(*part, gone);
  keys_.question.answered(*part, gone);
  branch_.question.answered(*part, gone);
  return lost;
}

}  // namespace phub
