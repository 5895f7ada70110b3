#include "tests/oracle/participation.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

constexpr std::string_view kWentOn = "the job went on from its checkpoint";

}  // namespace

Participation::Participation(std::span<const LogRecord> log, uint32_t chunks,
                             std::vector<uint32_t> fragments)
    : fragments_(std::move(fragments)) {
  for (size_t i = 0; i < log.size(); ++i) {
    const LogRecord& record = log[i];
    try {
      switch (record.kind) {
        case LogRecord::Kind::kAdmitted:
          begin(record, chunks);
          break;
        case LogRecord::Kind::kLost:
        case LogRecord::Kind::kLeft:
          end(record, i, chunks);
          break;
        case LogRecord::Kind::kExcluded:
          for (uint64_t round = record.round; round <= record.last_round; ++round) {
            for (const ChunkSpan& span : record.chunks) {
              for (uint32_t chunk = span.first; chunk <= span.last; ++chunk) {
                excluded_.emplace(round, chunk, record.rank);
              }
            }
          }
          break;
        case LogRecord::Kind::kLate:
          for (uint64_t round = record.round; round <= record.last_round; ++round) {
            late_.emplace(record.rank, record.fragment, round);
          }
          break;
        case LogRecord::Kind::kHyper:
        case LogRecord::Kind::kFailed:
        case LogRecord::Kind::kSet:
        case LogRecord::Kind::kForked:
        case LogRecord::Kind::kScheduled:
        case LogRecord::Kind::kDiscarded:
        case LogRecord::Kind::kKilled:
        case LogRecord::Kind::kRevived:
          break;
      }
    } catch (const Error& e) {
      fail(ErrorCode::kInvalid, "membership log, record {}: {}", i, e.what());
    }
  }
}

void Participation::begin(const LogRecord& record, uint32_t chunks) {
  std::vector<uint64_t> before(chunks);
  for (Stay& stay : stays_) {
    if (stay.until_checkpoint) stay.checkpoint = std::min(stay.checkpoint, record.round - 1);
    if (stay.rank != record.rank) continue;
    if (stay.last.empty()) {
      fail(ErrorCode::kInvalid, "rank {} is admitted while its incarnation {} is still there",
           record.rank, stay.incarnation);
    }
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      if (stay.until_checkpoint) {
        before[chunk] = std::max(before[chunk], stay.last[chunk]);
      } else if (stay.last[chunk] >= record.round) {
        fail(ErrorCode::kInvalid,
             "rank {} is admitted for round {}, but its incarnation {} is in round {} of chunk {}",
             record.rank, record.round, stay.incarnation, stay.last[chunk], chunk);
      }
    }
  }
  stays_.push_back({{record.rank, record.incarnation}, record.round, {}, std::move(before)});
}

void Participation::end(const LogRecord& record, size_t number, uint32_t chunks) {
  const auto stay = std::ranges::find_if(stays_, [&](const Stay& s) {
    return s.rank == record.rank && s.incarnation == record.incarnation && s.last.empty();
  });
  const bool took_part = std::ranges::any_of(
      record.last_rounds, [](const ChunkRange& range) { return range.round > 0; });
  if (stay == stays_.end() && !took_part && record.kind == LogRecord::Kind::kLost) {
    return;  // it was waited for, and never came
  }
  if (stay == stays_.end()) {
    fail(ErrorCode::kInvalid, "rank {}, incarnation {} goes but was not there", record.rank,
         record.incarnation);
  }
  std::vector<uint64_t> last;
  for (const ChunkRange& range : record.last_rounds) {
    if (range.first != last.size() || range.last < range.first || range.last >= chunks) {
      fail(ErrorCode::kInvalid, "rank {}: chunks {} to {} follow chunk {} of {}", record.rank,
           range.first, range.last, last.size(), chunks);
    }
    last.resize(range.last + 1, range.round);
  }
  if (last.size() != chunks) {
    fail(ErrorCode::kInvalid, "rank {}: the last rounds of {} chunks are there, not of {}",
         record.rank, last.size(), chunks);
  }
  stay->last = std::move(last);
  stay->until_checkpoint = record.reason == kWentOn;
  stay->ended = number;
}

uint64_t Participation::sent_for(uint64_t round, uint32_t chunk, uint32_t rank) const {
  const auto stay = std::ranges::find_if(stays_, [&](const Stay& each) {
    return each.rank == rank && each.first <= round &&
           (each.last.empty() || each.last[chunk] >= round);
  });
  const uint64_t first = stay == stays_.end() ? round : stay->first;
  while (round > first && is_late(round - 1, chunk, rank)) --round;
  return round;
}

std::vector<Member> Participation::members(uint64_t round, uint32_t chunk) const {
  std::vector<Member> members;
  for (const Stay& stay : stays_) {
    if (stay.covers(round, chunk) && !is_late(round, chunk, stay.rank)) members.push_back(stay);
  }
  std::ranges::sort(members);
  return members;
}

}  // namespace phub
