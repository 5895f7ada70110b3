// The ranks of a running job that save their own state, as parts of its snapshots: which of them
// took part in which rounds.
//
// A snapshot needs the part of every rank that saves and took part in the snapshot's round to its
// end. Where ranks are racks, the ranks that save are below them, and are not in the membership:
// a rack says which of its ranks save, from which round on and, of those that are gone, until
// which, and up to which round that is known. What a snapshot needs is in there, however long its
// round is over. A rack is known to save before the first of its ranks that does is admitted, so
// no snapshot begins without their parts.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/seats.h"

namespace phub {

class Savers {
 public:
  explicit Savers(const JobContext& context);

  // Ranks send their parts of the rounds that are multiples of this; 0: of none.
  uint64_t every() const;
  bool saves(uint32_t rank) const;  // and takes part
  bool any() const;                 // of the ranks that take part
  // Of the training: those that are there, and those that are gone and may have parts of snapshots
  // to come.
  std::vector<SaverStay> stays() const;
  bool any_lost_in(uint64_t round) const;  // took part in the round and is gone
  // The racks that have not said yet which of their ranks took part in the round.
  std::vector<uint32_t> racks_to_say(uint64_t round) const;

  // A rank is gone from every core. Returns whether it saved. `durable`: the last round that is
  // saved.
  bool lose(uint32_t rank, uint64_t durable);
  // Forgets ranks that are gone and that no snapshot will ask for.
  void forget(uint64_t durable);

  // A rack's news. Throw Error(kInvalid): it names ranks of others; kUnavailable: this box has a
  // parent, which does not know yet that ranks save here.
  void check_news(uint32_t rank, const RackNews& news) const;
  void take_news(uint32_t rank, RackNews& news);

  // Below a parent: a rank that saves may join only when the parent knows that there is one.
  // Returns whether the parent is still to be told. False: there is no parent.
  bool must_tell_parent();
  void add_to_news(RackNews& news);  // of this rack. REQUIRES: there is a parent

 private:
  bool has_racks() const { return !job_.spec().rack_ranks.empty(); }

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  Seats& seats_;
  Uplink* const uplink_;
  std::vector<SaverStay> lost_;
  bool tells_parent_ = false;  // that ranks save
};

}  // namespace phub
