// The clocks of jobs that are not in lock-step (SSP, async). A chunk has a clock for every rank,
// the number of the rank's updates that have been applied, and knows whose results are withheld
// until the slowest rank has come closer. (GeePS, section 4.2: vector clocks, slack.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"

namespace phub {

class CoreClocks {
 public:
  CoreClocks(size_t chunks, uint32_t ranks)
      : ranks_(ranks),
        clocks_(chunks * ranks, kNever),
        latest_(chunks * ranks),
        flags_(chunks * ranks),
        steps_(chunks) {}

  static constexpr uint64_t bytes(uint64_t chunks, uint64_t ranks) {  // held
    return chunks * (ranks * (2 * sizeof(uint64_t) + sizeof(uint8_t)) + sizeof(uint64_t));
  }

  // kNever: the rank does not take part.
  uint64_t of(uint32_t chunk, uint32_t rank) const { return clocks_[at(chunk, rank)]; }
  void set(uint32_t chunk, uint32_t rank, uint64_t clock) { clocks_[at(chunk, rank)] = clock; }
  void tick(uint32_t chunk, uint32_t rank) { ++clocks_[at(chunk, rank)]; }
  // The lowest clock of the ranks that take part; kNever if there are none.
  uint64_t slowest(uint32_t chunk) const {
    const auto first = clocks_.begin() + static_cast<ptrdiff_t>(at(chunk, 0));
    return *std::min_element(first, first + ranks_);
  }
  // The highest clock of them; 0 if there are none.
  uint64_t fastest(uint32_t chunk) const {
    uint64_t most = 0;
    for (uint32_t r = 0; r < ranks_; ++r) {
      if (of(chunk, r) != kNever) most = std::max(most, of(chunk, r));
    }
    return most;
  }

  // The round of the rank's last update that the chunk has; 0 means none. In a job that went on
  // from a checkpoint a rank may be behind that round.
  uint64_t latest(uint32_t chunk, uint32_t rank) const { return latest_[at(chunk, rank)]; }
  void set_latest(uint32_t chunk, uint32_t rank, uint64_t round) {
    latest_[at(chunk, rank)] = round;
  }

  bool withheld(uint32_t chunk, uint32_t rank) const { return has(kWithheld, chunk, rank); }
  void withhold(uint32_t chunk, uint32_t rank, bool yes) { set(kWithheld, chunk, rank, yes); }

  // Whether the results of the rank are the chunk's parameters as they are now.
  bool current(uint32_t chunk, uint32_t rank) const { return has(kCurrent, chunk, rank); }
  void set_current(uint32_t chunk, uint32_t rank, bool yes) { set(kCurrent, chunk, rank, yes); }
  void change(uint32_t chunk) {  // they are those of no rank any more
    for (uint32_t rank = 0; rank < ranks_; ++rank) set_current(chunk, rank, false);
  }

  // The optimizer's steps on the chunk, for all ranks together.
  uint64_t& steps(uint32_t chunk) { return steps_[chunk]; }
  uint64_t steps(uint32_t chunk) const { return steps_[chunk]; }

  // Chunk `id` of the job is `chunk` here.
  void save(uint32_t chunk, const SavedClocks& to, uint32_t id) const {
    to.steps[id] = steps_[chunk];
    std::copy_n(&latest_[at(chunk, 0)], ranks_, to.of(id));
  }
  void restore(uint32_t chunk, const SavedClocks& from, uint32_t id) {
    steps_[chunk] = from.steps[id];
    std::copy_n(from.of(id), ranks_, &latest_[at(chunk, 0)]);
  }

 private:
  enum Flag : uint8_t { kWithheld = 1, kCurrent = 2 };

  size_t at(uint32_t chunk, uint32_t rank) const { return size_t{chunk} * ranks_ + rank; }
  bool has(Flag flag, uint32_t chunk, uint32_t rank) const {
    return (flags_[at(chunk, rank)] & flag) != 0;
  }
  void set(Flag flag, uint32_t chunk, uint32_t rank, bool yes) {
    uint8_t& flags = flags_[at(chunk, rank)];
    flags = static_cast<uint8_t>(yes ? flags | flag : flags & ~flag);
  }

  const uint32_t ranks_;
  std::vector<uint64_t> clocks_;  // [chunk][rank]
  std::vector<uint64_t> latest_;  // [chunk][rank]
  std::vector<uint8_t> flags_;    // [chunk][rank]: Flag
  std::vector<uint64_t> steps_;   // per chunk
};

}  // namespace phub
