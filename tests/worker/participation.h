// Which ranks took part in a chunk's round, as the membership log of a job says.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "transport/messages.h"

namespace phub {

class Participation {
 public:
  // Throws Error(kInvalid) with the record's number where the log contradicts itself: a rank that
  // is lost without having been admitted, two incarnations that took part in the same round, ranges
  // that do not cover the chunks 0 … chunks-1 in order.
  Participation(std::span<const LogRecord> log, uint32_t chunks);

  // Ascending. Any round from 1 on.
  std::vector<uint32_t> ranks(uint64_t round, uint32_t chunk) const;

 private:
  // One incarnation's time in the job.
  struct Stay {
    uint32_t rank = 0;
    uint32_t incarnation = 0;
    uint64_t first = 0;
    std::vector<uint64_t> last;  // of each chunk; empty: it is still there
  };

  void begin(const LogRecord& record, uint32_t chunks);
  void end(const LogRecord& record, uint32_t chunks);

  std::vector<Stay> stays_;
  std::set<std::tuple<uint64_t, uint32_t, uint32_t>> excluded_;  // round, chunk, rank
};

}  // namespace phub
