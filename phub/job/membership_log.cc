#include "phub/job/membership_log.h"

#include <algorithm>
#include <utility>

#include "phub/core/index_set.h"
#include "transport/control/messages_json.h"

namespace phub {
namespace {

constexpr size_t kRoundsGathered = 2;  // chunks of one round may be a round behind the others

std::vector<ChunkSpan> spans_of(const std::vector<uint64_t>& bits) {
  std::vector<ChunkSpan> spans;
  for (uint32_t w = 0; w < bits.size(); ++w) {
    for_each_bit(bits[w], w, [&spans](uint32_t chunk) {
      if (!spans.empty() && spans.back().last + 1 == chunk) {
        spans.back().last = chunk;
      } else {
        spans.push_back({chunk, chunk});
      }
    });
  }
  return spans;
}

}  // namespace

std::vector<ChunkRange> ranges_of(const std::vector<uint64_t>& last_rounds) {
  std::vector<ChunkRange> ranges;
  for (uint32_t i = 0; i < last_rounds.size(); ++i) {
    if (!ranges.empty() && ranges.back().round == last_rounds[i]) {
      ranges.back().last = i;
    } else {
      ranges.push_back({i, i, last_rounds[i]});
    }
  }
  return ranges;
}

void MembershipLog::add(LogRecord record) {
  const std::vector<ChunkRange> ranges = std::exchange(record.last_rounds, {});
  const std::vector<ChunkSpan> chunks = std::exchange(record.chunks, {});
  const size_t parts =
      std::max<size_t>(1, (std::max(ranges.size(), chunks.size()) + kMostRanges - 1) / kMostRanges);
  const auto part_of = [](const auto& list, size_t part) {
    const size_t begin = std::min(list.size(), part * kMostRanges);
    const size_t end = std::min(list.size(), begin + kMostRanges);
    return std::vector(list.begin() + static_cast<ptrdiff_t>(begin),
                       list.begin() + static_cast<ptrdiff_t>(end));
  };
  for (size_t part = 0; part < parts; ++part) {
    record.last_rounds = part_of(ranges, part);
    record.chunks = part_of(chunks, part);
    write(record);
  }
}

void MembershipLog::write(const LogRecord& record) {
  if (pages_.empty() || pages_.back().text.size() >= kPageBytes) {
    const uint64_t first = pages_.empty() ? 0 : pages_.back().first + pages_.back().records;
    if (!pages_.empty()) {
      bytes_ -= pages_.back().text.capacity();
      pages_.back().text.shrink_to_fit();
      bytes_ += pages_.back().text.capacity();
    }
    pages_.push_back({.first = first, .records = 0, .text = {}});
    bytes_ += sizeof(Page);
    limit(kMostBytes);
  }
  Page& page = pages_.back();
  const size_t before = page.text.capacity();
  if (page.records > 0) page.text += ',';
  page.text += to_json(record);
  ++page.records;
  bytes_ += page.text.capacity() - before;
}

void MembershipLog::limit(uint64_t bytes) {
  while (bytes_ > bytes && pages_.size() > 1) {
    bytes_ -= sizeof(Page) + pages_.front().text.capacity();
    pages_.pop_front();
  }
}

LogPage MembershipLog::page(uint64_t from) {
  for (auto& [rank, gathering] : gatherings_) close(rank, gathering);
  gatherings_.clear();
  for (const auto& [who, record] : late_) add(record);
  late_.clear();
  if (pages_.empty()) return {.first = 0};
  const uint64_t end = pages_.back().first + pages_.back().records;
  if (from >= end) return {.first = end};
  const auto after = std::upper_bound(pages_.begin(), pages_.end(), from,
                                      [](uint64_t n, const Page& page) { return n < page.first; });
  const Page& page = after == pages_.begin() ? pages_.front() : *std::prev(after);
  LogPage out = from_json<LogPage>("{\"records\":[" + page.text + "]}");
  const uint64_t skipped = from > page.first ? from - page.first : 0;
  out.records.erase(out.records.begin(), out.records.begin() + static_cast<ptrdiff_t>(skipped));
  out.first = page.first + skipped;
  out.more = page.first + page.records < end;
  return out;
}

void MembershipLog::exclude(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round) {
  Gathering& gathering = gatherings_[rank];
  if (gathering.incarnation != incarnation) {
    close(rank, gathering);
    gathering = {.incarnation = incarnation, .rounds = {}, .record = {}};
  }
  std::vector<uint64_t>& bits = gathering.rounds[round];
  bits.resize(bit_words(chunks_));
  bits[chunk / 64] |= uint64_t{1} << (chunk % 64);
  if (gathering.rounds.size() > kRoundsGathered) close_round(rank, gathering);
}

void MembershipLog::note_late(uint32_t rank, uint32_t incarnation, uint32_t fragment,
                              uint64_t round) {
  LogRecord& record = late_[{rank, fragment}];
  if (record.incarnation == incarnation && record.last_round + 1 == round) {
    record.last_round = round;
    return;
  }
  if (record.round > 0) add(record);
  record = {.kind = LogRecord::Kind::kLate,
            .round = round,
            .rank = rank,
            .incarnation = incarnation,
            .last_round = round,
            .fragment = fragment};
}

// The lowest round that was gathered becomes part of the record before it, or the next record.
void MembershipLog::close_round(uint32_t rank, Gathering& gathering) {
  const auto lowest = gathering.rounds.begin();
  const uint64_t round = lowest->first;
  std::vector<ChunkSpan> chunks = spans_of(lowest->second);
  gathering.rounds.erase(lowest);
  LogRecord& record = gathering.record;
  if (record.chunks == chunks && record.last_round + 1 == round) {
    record.last_round = round;
    return;
  }
  if (!record.chunks.empty()) add(std::move(record));
  record = {.kind = LogRecord::Kind::kExcluded,
            .round = round,
            .rank = rank,
            .incarnation = gathering.incarnation,
            .last_round = round,
            .chunks = std::move(chunks)};
}

void MembershipLog::close(uint32_t rank, Gathering& gathering) {
  while (!gathering.rounds.empty()) close_round(rank, gathering);
  if (!gathering.record.chunks.empty()) add(std::exchange(gathering.record, {}));
}

uint64_t MembershipLog::gathering_bytes(uint64_t chunks, uint64_t ranks) {
  return ranks * (kRoundsGathered + 1) * bit_words(chunks) * sizeof(uint64_t);
}

}  // namespace phub
