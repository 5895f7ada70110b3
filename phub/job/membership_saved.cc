// A job's members in a checkpoint, and in a job that goes on from one.
//
// In lock-step all of the checkpoint is as of its round. Otherwise a chunk may have updates of
// later rounds, and says which (SavedClocks): these are not void. A rank that comes back still
// begins with the round after the checkpoint's, or after the last one of its predecessors; updates
// from there on that its chunks have already are acknowledged and change nothing.
#include <algorithm>
#include <map>
#include <utility>

#include "phub/job/membership.h"

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

// Whether it is a decision on hyperparameters or branches, which may hold from a future round.
bool is_decision(LogRecord::Kind kind) {
  using Kind = LogRecord::Kind;
  return kind == Kind::kHyper || kind == Kind::kForked || kind == Kind::kScheduled ||
         kind == Kind::kDiscarded || kind == Kind::kKilled || kind == Kind::kRevived;
}

// By rank, the last round that any chunk has.
std::vector<uint64_t> latest_of_all(const SavedClocks& clocks, uint32_t chunks) {
  std::vector<uint64_t> latest(clocks.ranks);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t* const of_chunk = clocks.of(chunk);
    for (uint32_t r = 0; r < clocks.ranks; ++r) latest[r] = std::max(latest[r], of_chunk[r]);
  }
  return latest;
}

}  // namespace

Manifest Membership::saved(uint64_t round) {
  Manifest saved;
  saved.round = round;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (rank.state == State::kLive) saved.live_ranks.push_back(r);
    saved.ranks.push_back({.incarnation = rank.incarnation,
                           .last_round = rank.last_round,
                           .expected = rank.expected});
  }
  saved.ranks.insert(saved.ranks.end(), beyond_.begin(), beyond_.end());
  saved.branches = branches().saved(round);
  for (LogPage page{.more = true}; page.more;) {
    page = log_.page(page.first + page.records.size());
    if (saved.log.empty()) saved.log_first = page.first;
    saved.log.insert(saved.log.end(), page.records.begin(), page.records.end());
  }
  return saved;
}

void Membership::restore(const Manifest& saved, const SavedClocks& clocks) {
  const uint64_t last = saved.round;
  restored_ = true;
  min_round_ = last + 1;
  restore_log(saved, clocks);
  decisions_.restore(saved);
  const std::vector<uint64_t> latest = latest_of_all(clocks, chunks_);
  if (spec_.branches > 0) {  // these rounds are of the branches of which they were
    for (const uint64_t round : latest) decisions_.note(round + 1);
  }
  const size_t known = std::min(ranks_.size(), saved.ranks.size());
  for (uint32_t r = 0; r < ranks_.size(); ++r) ranks_[r] = {};
  for (uint32_t r = 0; r < known; ++r) {
    const SavedRank& was = saved.ranks[r];
    Rank& rank = ranks_[r];
    rank.incarnation = was.incarnation;
    rank.first_round = last + 1;
    rank.last_round = std::min(was.last_round, r < latest.size() ? latest[r] : last);
    rank.expected = was.expected;
    rank.first = was.expected;
    if (was.incarnation == 0) continue;
    rank.state = State::kLost;
    rank.reason = "it has not come back since the job went on from its checkpoint";
  }
  for (size_t r = known; r < saved.ranks.size(); ++r) {
    beyond_.push_back(saved.ranks[r]);
    beyond_.back().expected = false;
  }
}

// Records of rounds that the checkpoint does not have are void.
void Membership::restore_log(const Manifest& saved, const SavedClocks& clocks) {
  for (LogRecord record : saved.log) {
    if (record.kind == LogRecord::Kind::kExcluded && clocks.latest) {
      restore_excluded(std::move(record), clocks);
      continue;
    }
    const bool of_round =
        record.kind == LogRecord::Kind::kExcluded || record.kind == LogRecord::Kind::kSet;
    if (of_round && record.round > saved.round) continue;
    record.last_round = std::min(record.last_round, saved.round);
    record.last_rounds =
        clipped(std::move(record.last_rounds), record.rank, saved.round, clocks, chunks_);
    if (is_decision(record.kind)) decisions_.note(record.round);
    log_.add(record);
  }
  for (const uint32_t rank : saved.live_ranks) {
    if (rank >= saved.ranks.size()) continue;
    log_.add(
        {.kind = LogRecord::Kind::kLost,
         .rank = rank,
         .incarnation = saved.ranks[rank].incarnation,
         .reason = "the job went on from its checkpoint",
         .last_rounds = clipped({{0, chunks_ - 1, kNever}}, rank, saved.round, clocks, chunks_)});
  }
}

// Restores an exclusion, for each chunk in the rounds that it has.
void Membership::restore_excluded(LogRecord record, const SavedClocks& clocks) {
  std::map<uint64_t, std::vector<ChunkSpan>> chunks;  // by the last of them
  for (const ChunkSpan& span : record.chunks) {
    if (record.rank >= clocks.ranks) return;
    for (uint32_t chunk = span.first; chunk < chunks_ && chunk <= span.last; ++chunk) {
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
    log_.add(record);
  }
}

}  // namespace phub
