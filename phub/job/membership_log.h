// The log of a job: with it a reference can recompute the run. Its memory is bounded.
//
// Records are kept as the text of pages, so the cost of reading a page does not grow with the log.
// Exclusions are gathered: the chunks that a rank was left out of in a round make one record, and
// so do rounds in a row that lack the same chunks. When the log is full, its oldest page goes: the
// numbers of the records, which never change, tell readers so.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

class MembershipLog {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{128} << 20;
  static constexpr uint64_t kPageBytes = uint64_t{64} << 10;  // and one record
  static constexpr size_t kMostRanges = 1024;  // in a record; more make several records, in order

  explicit MembershipLog(uint32_t chunks) : chunks_(chunks) {}

  void add(LogRecord record);
  // The rank was left out of the chunk in this round.
  void exclude(uint32_t rank, uint32_t incarnation, uint32_t chunk, uint64_t round);
  // The fragment's round went on without the rank. Rounds in a row make one record.
  void note_late(uint32_t rank, uint32_t incarnation, uint32_t fragment, uint64_t round);

  // Returns records from `from` on, or from the oldest that is left, gathered exclusions included.
  LogPage page(uint64_t from);

  // Drops the oldest pages until the log holds no more than `bytes`, or has one page left.
  void limit(uint64_t bytes);
  uint64_t bytes() const { return bytes_; }

  // The most bytes that exclusions hold while they are gathered.
  static uint64_t gathering_bytes(uint64_t chunks, uint64_t ranks);

 private:
  struct Page {
    uint64_t first = 0;  // number of its first record
    uint64_t records = 0;
    std::string text;  // JSON objects, with commas between them
  };
  // The exclusions of one incarnation of a rank.
  struct Gathering {
    uint32_t incarnation = 0;
    std::map<uint64_t, std::vector<uint64_t>> rounds;  // a bit per chunk; at most two rounds
    LogRecord record;                                  // rounds before these; no chunks: none
  };

  void write(const LogRecord& record);
  void close_round(uint32_t rank, Gathering& gathering);
  void close(uint32_t rank, Gathering& gathering);

  uint32_t chunks_;
  std::deque<Page> pages_;
  uint64_t bytes_ = 0;
  std::map<uint32_t, Gathering> gatherings_;                 // by rank
  std::map<std::pair<uint32_t, uint32_t>, LogRecord> late_;  // by rank and fragment
};

// Consecutive chunks with the same last round make one range.
std::vector<ChunkRange> ranges_of(const std::vector<uint64_t>& last_rounds);

}  // namespace phub
