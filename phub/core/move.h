// A move of chunks between two rounds on a core: a snapshot (snapshot.h), or the state of some keys
// that is got or set (key_states.h). moves.h has them all, and says when each is made.
#pragma once

#include <cstdint>

#include "phub/core/due_chunks.h"
#include "phub/core/messages.h"

namespace phub {

class Way;

class Move {
 public:
  // `done` is the report that all its chunks are moved. `when_idle` means that the core moves a
  // chunk when it has nothing else to do; else it does so only when it is about to close the round.
  Move(const ChunkTable& table, CoreReport::Type done, bool when_idle)
      : chunks(table), done_(done), when_idle_(when_idle) {}
  virtual ~Move() = default;

  // Moves a chunk, and marks it as done. Returns the bytes that were read and written.
  virtual uint64_t make(uint32_t index, const Way& way) = 0;

  CoreReport::Type done() const { return done_; }
  bool when_idle() const { return when_idle_; }
  // The round that a chunk has to begin before this move can be complete, if it may be in an
  // earlier one; 0: no move is under way.
  uint64_t needs_round() const {
    if (!chunks.under_way()) return 0;
    return when_idle_ ? chunks.round() : chunks.round() + 1;
  }

  DueChunks chunks;

 private:
  const CoreReport::Type done_;
  const bool when_idle_;
};

}  // namespace phub
