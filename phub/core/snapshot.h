// A core's part of a snapshot: copies of its chunks as they are between two rounds.
//
// A chunk that is due is copied when the core has nothing else to do, and at the latest before it
// closes the snapshot's round. So nobody waits for a snapshot. Nothing allocates after
// construction.
#pragma once

#include <cstdint>

#include "phub/core/job_parameters.h"
#include "phub/core/move.h"
#include "phub/core/places.h"
#include "phub/core/trace.h"

namespace phub {

class Snapshot final : public Move {
 public:
  // Copies `arrays` and the content of the places to those arrays of arrays.copy that are not null.
  Snapshot(const JobArrays& arrays, const Places& places, const ChunkTable& table,
           const CoreTrace& trace);

  // Begins a snapshot at a boundary. `as_they_are` means that no chunk comes to `round` any more.
  // `last` drops an incomplete snapshot. REQUIRES otherwise: the snapshot before is complete.
  void begin(uint64_t round, bool as_they_are = false, bool last = false) {
    if (as_they_are || last) chunks.drop();
    chunks.begin(
        round, [](const CoreChunk&) { return true; }, as_they_are);
  }
  // Copies the chunk, and the way's data about it.
  uint64_t make(uint32_t index, const Way& way) override;

 private:
  const JobArrays arrays_;
  const Places& places_;
  const ChunkTable& table_;
  const CoreTrace& trace_;
  uint64_t bytes_per_element_ = 0, bytes_per_chunk_ = 0;  // read and written
};

}  // namespace phub
