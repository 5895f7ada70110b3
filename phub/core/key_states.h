// A core's part of getting and setting the state of some keys while the job runs: f32 parameters
// and the optimizer's states, as they are between two rounds.
//
// Get: a chunk that is due is copied as a snapshot copies it. Set: a chunk gets its state when the
// core is about to close the round. By then every rank has pushed, so nobody reads the parameters
// that are replaced, also where they lie in shared memory. Until then the state that was set is the
// chunk's for a get that comes later. A snapshot of the same round is of before it. Nothing
// allocates after construction.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/due_chunks.h"
#include "phub/core/places.h"
#include "phub/core/trace.h"

namespace phub {

// The chunks' state in memory of its own. The control thread owns it; while cores have it, it does
// not change but for what a get writes.
struct KeyStateMemory {
  static constexpr uint64_t kNowhere = ~uint64_t{0};
  struct Place {                // of a chunk; in floats
    uint64_t first = kNowhere;  // where its parameters begin
    uint64_t stride = 0;        // from there to its first state, and on to the next
    uint64_t steps = 0;         // that the optimizer has made before the round
  };
  std::vector<Place> places;  // by chunk of the job
  float* floats = nullptr;
};

class KeyStates {
 public:
  KeyStates(const Places& places, ChunkTable& table, const CoreTrace& trace);
  static constexpr uint64_t bytes(uint64_t chunks) { return 2 * DueChunks::bytes(chunks); }

  // At a boundary. REQUIRES: the get or set before it is complete; no get is under way. The memory
  // lives until it is complete.
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
