// Which ranks took part in a chunk's round, as the membership log of a job says.
#pragma once

#include <compare>
#include <cstdint>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

// One incarnation of a rank.
struct Member {
  uint32_t rank = 0;
  uint32_t incarnation = 0;

  friend auto operator<=>(const Member&, const Member&) = default;
};

class Participation {
 public:
  // One incarnation's time in the job.
  struct Stay : Member {
    uint64_t first = 0;
    std::vector<uint64_t> last;     // of each chunk; empty: it is still there
    std::vector<uint64_t> before;   // of each chunk: what it did again up to this round was there
    bool until_checkpoint = false;  // it ended because the job went on from one
    size_t ended = ~size_t{0};      // which of the log's records says so
    // Of this round, says who was admitted next. Out of lock-step the checkpoint has more rounds of
    // ranks that were ahead, but nothing that these ranks had for themselves then.
    uint64_t checkpoint = ~uint64_t{0};
    bool covers(uint64_t round, uint32_t chunk) const {
      return round >= first && round > before[chunk] && (last.empty() || round <= last[chunk]);
    }
    bool repeats(uint64_t round, uint32_t chunk) const {
      return round >= first && round <= before[chunk];
    }
  };

  // Throws Error(kInvalid) with the record's number where the log contradicts itself: a rank that
  // is lost without having been admitted, two incarnations that took part in the same round, ranges
  // that do not cover the chunks 0 … chunks-1 in order. Who comes back after a checkpoint may do
  // rounds again that some chunks have: these are its predecessor's.
  // `fragments`: by chunk; empty: all are of fragment 0.
  Participation(std::span<const LogRecord> log, uint32_t chunks,
                std::vector<uint32_t> fragments = {});

  // Those that a chunk's round heard of, ascending by rank. Any round from 1 on.
  std::vector<Member> members(uint64_t round, uint32_t chunk) const;
  // Whether a member's gradient was left out.
  bool excluded(uint64_t round, uint32_t chunk, uint32_t rank) const {
    return excluded_.contains({round, chunk, rank});
  }
  const std::vector<Stay>& stays() const { return stays_; }  // in the log's order
  // The chunk's round went on without the rank, as that of its fragment.
  bool is_late(uint64_t round, uint32_t chunk, uint32_t rank) const {
    return late_.contains({rank, fragments_.empty() ? 0 : fragments_[chunk], round});
  }
  // The round that a member of this one sent its gradient for: an earlier one if it was late since.
  uint64_t sent_for(uint64_t round, uint32_t chunk, uint32_t rank) const;

 private:
  void begin(const LogRecord& record, uint32_t chunks);
  void end(const LogRecord& record, size_t number, uint32_t chunks);

  std::vector<Stay> stays_;
  std::set<std::tuple<uint64_t, uint32_t, uint32_t>> excluded_;  // round, chunk, rank
  std::set<std::tuple<uint32_t, uint32_t, uint64_t>> late_;      // rank, fragment, round
  std::vector<uint32_t> fragments_;
};

// For Participation; of each chunk its `key` says the fragment.
template <typename Chunks>
std::vector<uint32_t> fragments_by_chunk(const JobSpec& spec, const Chunks& chunks) {
  std::vector<uint32_t> fragments;
  for (const auto& chunk : chunks) fragments.push_back(spec.keys[chunk.key].fragment);
  return fragments;
}

}  // namespace phub
