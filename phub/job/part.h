// A part of a job: the chunks that one box has of it, and the cores that own them. Whoever drives
// the job uses the same verbs for the part in its own box (LocalPart) and for those in other boxes
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

// A boundary, and what else a part needs to carry it out.
struct Commit {
  Boundary& boundary;  // the part completes it: slots, interest, hyperparameters, orders
  std::span<const HyperChange> hyper = {};   // changes from boundary.round on or later, ascending
  std::span<const BranchOrder> orders = {};  // for rounds after boundary.round, ascending
  uint64_t lowest_round = 0;                 // that any chunk of the job is in
  uint64_t state = 0;   // the number of the state of keys that is read or set; 0 means none
  uint64_t branch = 0;  // the number of the branch that comes from files; 0 means none
};

class Part {
 public:
  // Called once at most, with what it failed with. After remove() nobody heeds it.
  using Done = std::function<void(const std::optional<Error>& failed)>;

  virtual ~Part() = default;

  virtual void start() = 0;  // its cores get the job; each says kRemoved in the end
  // Makes memory and queue pairs of a rank; then `offer` has those of this part, and `done` is
  // called. A ticket that the offer has is used, else there is a new one. The offer lives until
  // then.
  virtual void admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
                     Offer& offer, Done done) = 0;
  // The same for new queue pairs of a rank, after its cores have detached it.
  virtual void reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) = 0;
  // Closes the connections of a rank, after its cores have detached it.
  virtual void revoke(uint32_t rank) = 0;

  virtual void hold() = 0;                                       // each core: kHeld
  virtual void commit(const Commit& commit) = 0;                 // kCommitted …
  virtual void detach(uint32_t rank) = 0;                        // kDetached
  virtual void attach(uint32_t rank, uint32_t incarnation) = 0;  // kAttached
  // `begun`: the latest round that a gate has begun to close; 0 means that rounds are not gated.
  virtual void probe(uint64_t begun) = 0;  // kProbed
  // Something has happened since the last call or probe, or `begun` is a later round.
  virtual bool wants_probe(uint64_t begun) = 0;

  virtual void remove() = 0;      // the cores let go of the job
  virtual bool gone() const = 0;  // all have, and nothing beside this thread uses it
};

}  // namespace phub
