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

#include "phub/core/chunk_table.h"
#include "phub/core/due_chunks.h"
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

class KeyStates {
 public:
  KeyStates(const Places& places, ChunkTable& table, const CoreTrace& trace);
  static constexpr uint64_t bytes(uint64_t chunks) { return 2 * DueChunks::bytes(chunks); }

  // Called at a boundary. REQUIRES: the last get or set is complete; no get is under way. The
  // memory lives until this one is complete.
  void begin_get(KeyStateMemory& to, uint64_t round) { begin(get, to_ = &to, round); }
  void begin_set(const KeyStateMemory& from, uint64_t round) { begin(set, from_ = &from, round); }
  void reached(uint32_t index) {
    get.reached(index);
    set.reached(index);
  }

  void copy_out(uint32_t index);  // REQUIRES: get.is_due(index)
  void copy_in(uint32_t index);   // REQUIRES: set.is_due(index)
  uint64_t cost(const CoreChunk& chunk) const { return chunk.elements * bytes_per_element_; }

  DueChunks get, set;

 private:
  static void begin(DueChunks& chunks, const KeyStateMemory* memory, uint64_t round) {
    chunks.begin(round, [memory](const CoreChunk& chunk) {
      return memory->places[chunk.id].first != KeyStateMemory::kNowhere;
    });
  }

  const Places& places_;
  ChunkTable& table_;
  const CoreTrace& trace_;
  KeyStateMemory* to_ = nullptr;
  const KeyStateMemory* from_ = nullptr;
  uint64_t bytes_per_element_ = 0;  // read and written
};

}  // namespace phub
