// A core's part of getting and setting the state of some keys while the job runs: f32 parameters
// and the optimizer's states, as they are between two rounds.
//
// Get: a chunk that is due is copied as a snapshot copies it. Set: a chunk gets its state when the
// core is about to close the round. By then every rank has pushed, so no rank reads the parameters
// that are replaced, not even in shared memory. A get that comes before then already sees the state
// that was set. A snapshot of the same round has the state before the set. Nothing allocates after
// construction.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core/move.h"
#include "phub/core/places.h"
#include "phub/core/trace.h"

namespace phub {

// The chunks' state in memory of its own. The control thread owns it; while cores have it, only a
// get changes it.
struct KeyStateMemory {
  static constexpr uint64_t kNowhere = ~uint64_t{0};
  struct Place {                // a chunk's; in floats
    uint64_t first = kNowhere;  // where its parameters begin
    uint64_t stride = 0;        // from there to its first state, and on to the next
    uint64_t steps = 0;         // steps of the optimizer before the round
  };
  std::vector<Place> places;  // by chunk of the job
  float* floats = nullptr;
};

class SetKeyStates final : public Move {
 public:
  SetKeyStates(const Places& places, ChunkTable& table, const CoreTrace& trace)
      : Move(table, CoreReport::kSetState, false), places_(places), table_(table), trace_(trace) {}

  // Called at a boundary. REQUIRES: the set before is complete. The memory lives until this one is.
  void begin(const KeyStateMemory& from, uint64_t round);
  uint64_t make(uint32_t index, const Way& way) override;

  // The state that a chunk is about to get.
  const KeyStateMemory::Place& place_of(const CoreChunk& chunk) const {
    return from_->places[chunk.id];
  }
  const float* state_of(const CoreChunk& chunk, uint64_t nth) const {
    return from_->floats + place_of(chunk).first + nth * place_of(chunk).stride;
  }

 private:
  const Places& places_;
  ChunkTable& table_;
  const CoreTrace& trace_;
  const KeyStateMemory* from_ = nullptr;
};

class GetKeyStates final : public Move {
 public:
  GetKeyStates(const Places& places, const ChunkTable& table, const SetKeyStates& set,
               const CoreTrace& trace)
      : Move(table, CoreReport::kGotState, true),
        places_(places),
        table_(table),
        set_(set),
        trace_(trace) {}

  // Called at a boundary. REQUIRES: the get before is complete. The memory lives until this one is.
  void begin(KeyStateMemory& to, uint64_t round);
  uint64_t make(uint32_t index, const Way& way) override;

 private:
  const Places& places_;
  const ChunkTable& table_;
  const SetKeyStates& set_;
  const CoreTrace& trace_;
  KeyStateMemory* to_ = nullptr;
};

}  // namespace phub
