// A shard's part of the state of keys on its way between its cores and the server: memory for the
// chunks that are here. Or of a branch that comes from files: memory for all that is here. Plain
// data: control thread only, but for the memory while it is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "numa/memory.h"
#include "phub/core/key_states.h"
#include "phub/job/job_part.h"
#include "phub/job/saved_image.h"
#include "transport/control/shard_messages.h"

namespace phub {

struct StateShare {
  // Throws Error(kInvalid): a key, or branches, that the job does not have.
  StateShare(const JobPart& job, const ShardKeys& order);

  // Takes long. Throws Error(kFull).
  void allocate(const JobPart& job);
  bool is_branch() const { return what.keys.empty(); }
  // Between `where`, as cores have it, and the end of what moves.
  void send_steps() const;
  void take_steps();
  uint64_t memory_bytes() const {  // all that it takes
    return bytes + where.places.size() * sizeof(KeyStateMemory::Place);
  }

  enum class Stage {
    kMaking,   // its memory is made
    kMoving,   // to or from the server
    kThere,    // until the boundary
    kCopying,  // until every core has copied
  };
  Stage stage = Stage::kMaking;
  const ShardKeys what;
  bool is_busy = false;          // a thread has it
  bool is_over = false;          // and it is dropped then
  std::vector<uint32_t> chunks;  // that are here, ascending
  uint64_t floats = 0, bytes = 0;
  uint32_t cores = 0;  // that have copied
  KeyStateMemory where;
  numa::Memory memory;    // of keys
  JobPart::Shelf branch;  // until the boundary
  SavedImage image;       // what moves
};

}  // namespace phub
