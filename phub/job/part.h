// A part of a job: the chunks that one box has of it, and the cores that own them. The job's driver
// uses the same verbs for the part in its own box (LocalPart) and for those in other boxes
// (RemoteParts). The answers come as CoreReport (core/messages.h), to the driver itself.
//
// Control thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "phub/core/branch_orders.h"
#include "phub/core/messages.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

// A boundary, and the rest that a part needs to carry it out.
struct Commit {
  Boundary& boundary;  // the part completes it: slots, interest, hyperparameters, orders
  std::span<const HyperChange> hyper = {};   // changes from boundary.round on or later, ascending
  std::span<const BranchOrder> orders = {};  // for rounds after boundary.round, ascending
  uint64_t lowest_round = 0;                 // the lowest that any chunk of the job is in
  uint64_t state = 0;   // the number of the state of keys that is read or set; 0 means none
  uint64_t branch = 0;  // the number of the branch that comes from files; 0 means none
};

class Part {
 public:
  // Called at most once, with the error if it failed. After remove() a call has no effect.
  using Done = std::function<void(const std::optional<Error>& failed)>;

  virtual ~Part() = default;

  virtual void start() = 0;  // its cores get the job; each says kRemoved in the end
  // Makes memory and queue pairs of a rank; then adds those of this part to `offer`, which lives
  // until then, and calls `done`. Uses the offer's ticket if it has one, else makes a new one.
  virtual void admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
                     Offer& offer, Done done) = 0;
  // Does the same for new queue pairs of a rank, after its cores have detached it.
  virtual void reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) = 0;
  // Closes the connections of a rank, after its cores have detached it.
  virtual void revoke(uint32_t rank) = 0;

  virtual void hold() = 0;                                       // each core: kHeld
  virtual void commit(const Commit& commit) = 0;                 // kCommitted …
  virtual void detach(uint32_t rank) = 0;                        // kDetached
  virtual void attach(uint32_t rank, uint32_t incarnation) = 0;  // kAttached
  // `begun`: the latest round that a gate has begun to close; 0 means that rounds are not gated.
  virtual void probe(uint64_t begun) = 0;  // kProbed
  // Whether something has happened since the last call or probe, or `begun` is a later round.
  virtual bool wants_probe(uint64_t begun) = 0;

  virtual void remove() = 0;      // the cores let go of the job
  virtual bool gone() const = 0;  // all have, and no task on another thread uses it
};

}  // namespace phub
