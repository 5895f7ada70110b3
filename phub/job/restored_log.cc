#include "phub/job/restored_log.h"

#include <algorithm>
#include <map>
#include <utility>

namespace phub {
namespace {

// The rank's last rounds in the checkpoint, for the chunks in `before`.
std::vector<ChunkRange> clipped(std::vector<ChunkRange> before, uint32_t rank, uint64_t last,
                                const SavedClocks& clocks, uint32_t chunks) {
  std::vector<ChunkRange> ranges;
  for (ChunkRange& range : before) {
    if (clocks.latest == nullptr) {
      range.round = std::min(range.round, last);
      ranges.push_back(range);
      continue;
    }
    for (uint32_t chunk = range.first; chunk < chunks && chunk <= range.last; ++chunk) {
      const uint64_t latest = rank < clocks.ranks ? clocks.of(chunk)[rank] : 0;
      const uint64_t round = std::min(range.round, latest);
      if (ranges.empty() || ranges.back().round != round) ranges.push_back({chunk, chunk, round});
      ranges.back().last = chunk;
    }
  }
  return ranges;
}

// Restores an exclusion, for each chunk in the rounds that it has.
void restore_excluded(LogRecord record, const SavedClocks& clocks, uint32_t all_chunks,
                      MembershipLog& log) {
  std::map<uint64_t, std::vector<ChunkSpan>> chunks;  // by the last of them
  for (const ChunkSpan& span : record.chunks) {
    if (record.rank >= clocks.ranks) return;
    for (uint32_t chunk = span.first; chunk < all_chunks && chunk <= span.last; ++chunk) {
      const uint64_t last = std::min(record.last_round, clocks.of(chunk)[record.rank]);
      if (last < record.round) continue;
      std::vector<ChunkSpan>& spans = chunks[last];
      if (spans.empty() || spans.back().last + 1 != chunk) spans.push_back({chunk, chunk});
      spans.back().last = chunk;
    }
  }
  for (auto& [last, spans] : chunks) {
    record.last_round = last;
    record.chunks = std::move(spans);
    log.add(record);
  }
}

}  // namespace

std::vector<uint64_t> latest_of_all(const SavedClocks& clocks, uint32_t chunks) {
  std::vector<uint64_t> latest(clocks.ranks);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t* const of_chunk = clocks.of(chunk);
    for (uint32_t r = 0; r < clocks.ranks; ++r) latest[r] = std::max(latest[r], of_chunk[r]);
  }
  return latest;
}

// Records of rounds that the checkpoint does not have are void.
void restore_log(const Manifest& saved, const SavedClocks& clocks, uint32_t chunks,
                 MembershipLog& log, Decisions& decisions) {
  for (LogRecord record : saved.log) {
    if (record.kind == LogRecord::Kind::kExcluded && clocks.latest) {
      restore_excluded(std::move(record), clocks, chunks, log);
      continue;
    }
    const bool of_round = record.kind == LogRecord::Kind::kExcluded ||
                          record.kind == LogRecord::Kind::kSet ||
                          record.kind == LogRecord::Kind::kLate;
    if (of_round && record.round > saved.round) continue;
    record.last_round = std::min(record.last_round, saved.round);
    record.last_rounds =
        clipped(std::move(record.last_rounds), record.rank, saved.round, clocks, chunks);
    decisions.note(record);
    log.add(record);
  }
  for (const uint32_t rank : saved.live_ranks) {
    if (rank >= saved.ranks.size()) continue;
    log.add({.kind = LogRecord::Kind::kLost,
             .rank = rank,
             .incarnation = saved.ranks[rank].incarnation,
             .reason = "the job went on from its checkpoint",
             .last_rounds = clipped({{0, chunks - 1, kNever}}, rank, saved.round, clocks, chunks)});
  }
}

}  // namespace phub
