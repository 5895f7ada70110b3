// The moves of a core (move.h) in their order: by round, and within a round a snapshot, then a
// state that is set, then a state that is got.
#pragma once

#include <array>
#include <cstdint>

#include "phub/core/key_states.h"
#include "phub/core/move.h"
#include "phub/core/snapshot.h"

namespace phub {

class Moves {
 public:
  Moves(const JobArrays& arrays, const Places& places, ChunkTable& table, const CoreTrace& trace)
      : table_(table),
        snapshot_(arrays, places, table, trace),
        set_(places, table, trace),
        get_(places, table, set_, trace) {}
  Moves(const Moves&) = delete;
  Moves& operator=(const Moves&) = delete;
  static constexpr uint64_t bytes(uint64_t chunks) { return kMoves * DueChunks::bytes(chunks); }

  // Called at a boundary: begins its moves.
  void begin(const Boundary& boundary);
  void drop_snapshot() { snapshot_.chunks.drop(); }
  // The round that every chunk has to begin before all moves can be complete; 0: any.
  uint64_t needs_round() const;

  // The chunk has begun another round.
  void reached(uint32_t index) {
    for (Move* move : all_) move->chunks.reached(index);
  }
  // Makes what is due before the chunk's round in progress is closed. Returns the bytes that were
  // read and written.
  uint64_t make_due(uint32_t index, const Way& way) {
    uint64_t bytes = 0;
    for (Move* move : all_) {
      if (move->chunks.is_due(index)) bytes += move->make(index, way);
    }
    return bytes;
  }
  // Does the same with what belongs before an earlier round of the chunk than `round`.
  uint64_t make_before(uint32_t index, uint64_t round, const Way& way);
  // The core has nothing else to do: moves one chunk, and adds the bytes that were read and
  // written. False: none is due.
  bool make_when_idle(const Way& way, uint64_t& bytes);

  // The core has something to do, or to report, without another arrival.
  bool are_due() const;
  // A state is set with the round that this chunk is in.
  bool sets(uint32_t index) const { return set_.chunks.round() == table_[index].round; }
  bool sets_before(uint32_t index, uint64_t round) const {
    return set_.chunks.is_before(index, round);
  }
  // The next of the moves that are complete; null: none. Returns each once.
  Move* take_complete();

 private:
  static constexpr size_t kMoves = 3;

  const ChunkTable& table_;
  Snapshot snapshot_;
  SetKeyStates set_;
  GetKeyStates get_;
  const std::array<Move*, kMoves> all_ = {&snapshot_, &set_, &get_};
};

}  // namespace phub
