// The state of some keys on its way between the cores and one rank: the request, and the memory for
// it. A rank that reads gets the state when every core has copied its chunks; a rank that sets
// sends the state piece by piece, and then every core takes it. Other boxes have memory of their
// own for their chunks: a state that is read comes from there, and a state that is set goes there
// first. Plain data: control thread only, but for `memory` while it is copied.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "numa/memory.h"
#include "phub/core/key_states.h"
#include "phub/job/job.h"
#include "phub/job/saved_image.h"
#include "transport/control/state_messages.h"

namespace phub {

// Throws Error(kNotFound), as that rank does not read or set a state now.
[[noreturn]] void fail_not_open(const std::string& job, uint32_t rank, bool sets);
// Throws Error(kInvalid) unless `size` bytes from `offset` on lie within the `bytes` of a state and
// are whole floats.
void check_piece_of_state(uint64_t offset, uint64_t size, uint64_t bytes);

struct StateTransfer {
  // Throws Error(kInvalid): a key that the job does not have or that is named twice; steps that are
  // not one for each key, or too many.
  StateTransfer(const Job& job, uint64_t number, const StateRequest& request);

  // Takes long. Throws Error(kFull).
  void allocate(const Job& job);
  // Answers the rank's call with an error, if one waits.
  void refuse(ErrorCode code, const std::string& why);
  // For a get that every core has copied: for each key the most steps that any of its chunks has
  // made.
  std::vector<uint64_t> steps_of_keys(const Job& job) const;
  // The memory that it takes here beside `bytes`.
  static uint64_t bookkeeping(const Job& job);

  enum class Stage {
    kMaking,    // its memory is made
    kOpen,      // the rank reads or sends pieces
    kSharing,   // until all other boxes have memory for it, and the set state
    kDeciding,  // until the boundary
    kCopying,   // until every core has copied
  };
  Stage stage = Stage::kMaking;
  const uint64_t number;  // other boxes know it by this
  const bool sets;
  const uint32_t rank, incarnation;
  std::vector<uint32_t> keys;
  std::vector<uint64_t> steps;     // a set's, by key: steps before `round`
  uint64_t bytes = 0;              // parameters and states
  uint64_t round = 0;              // every core copies before it closes this round
  uint64_t received = 0;           // a set's: bytes that have come, from the beginning
  bool is_over = false;            // no rank wants it any more, but a core or a thread has it
  uint32_t cores = 0;              // cores that have copied
  bool is_shared = false;          // other boxes may have it; no boundary has it yet
  std::vector<SavedImage> shares;  // by box of the plan: its part here; this box's is empty
  KeyStateMemory where;
  numa::Memory memory;
  Reply<StateReply> begun;    // until it is open
  Reply<HyperReply> decided;  // a set's, until the boundary

 private:
  void share(const Job& job);
};

}  // namespace phub
