// The state of some keys on its way between the cores and one rank: what was asked for, and the
// memory for it. A rank gets it when every core has copied its chunks; or it sends it piece by
// piece, and then every core takes it. Other boxes have memory of their own for their chunks: what
// a rank reads comes from there, and what it sets goes there first. Plain data: control thread
// only, but for `memory` while it is copied.
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

// Throws Error(kNotFound): that rank does not read or set it now.
[[noreturn]] void fail_not_open(const std::string& job, uint32_t rank, bool sets);
// Throws Error(kInvalid) unless `size` bytes from `offset` on are some of the `bytes` of a state,
// in whole floats.
void check_piece_of_state(uint64_t offset, uint64_t size, uint64_t bytes);

struct StateTransfer {
  // Throws Error(kInvalid): a key that the job does not have or that is named twice; steps that are
  // not one for each key, or too many.
  StateTransfer(const Job& job, uint64_t number, const StateRequest& request);

  // Takes long. Throws Error(kFull).
  void allocate(const Job& job);
  // Answers the rank's call, if there is one that waits.
  void refuse(ErrorCode code, const std::string& why);
  // Of a get that every core has copied: of each key the most that any of its chunks has made.
  std::vector<uint64_t> steps_of_keys(const Job& job) const;
  // What it takes here beside `bytes`.
  static uint64_t bookkeeping(const Job& job);

  enum class Stage {
    kMaking,    // its memory is made
    kOpen,      // the rank reads or sends pieces
    kSharing,   // until all other boxes have memory for it, and what is set
    kDeciding,  // until the boundary
    kCopying,   // until every core has copied
  };
  Stage stage = Stage::kMaking;
  const uint64_t number;  // by which other boxes know it
  const bool sets;
  const uint32_t rank, incarnation;
  std::vector<uint32_t> keys;
  std::vector<uint64_t> steps;     // of a set, by keys: made before `round`
  uint64_t bytes = 0;              // of parameters and states
  uint64_t round = 0;              // every core copies before it closes this round
  uint64_t received = 0;           // of a set: the bytes from the beginning that have come
  bool is_over = false;            // nobody wants it any more, but a core or a thread has it
  uint32_t cores = 0;              // that have copied
  bool is_shared = false;          // other boxes may have it, and no boundary
  std::vector<SavedImage> shares;  // here, of what each box of the plan has; of this one, none
  KeyStateMemory where;
  numa::Memory memory;
  Reply<StateReply> begun;    // until it is open
  Reply<HyperReply> decided;  // of a set, until the boundary

 private:
  void share(const Job& job);
};

}  // namespace phub
