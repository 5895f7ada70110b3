// The ranks of a running job that save their own state, as parts of its snapshots, and the rounds
// in which each of them took part.
//
// A snapshot needs the part of every rank that saves and took part in the snapshot's round to its
// end. If ranks are racks, the ranks that save are below them, and are not in the membership:
// a rack says which of its ranks save, from which round on, until which round if they are gone, and
// up to which round it knows this. So a snapshot finds its ranks there, however long ago its round
// was. A rack is known to save before its first rank that saves is admitted, so no snapshot begins
// without their parts.
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

  // Ranks send their parts for the rounds that are multiples of this; 0: for none.
  uint64_t every() const;
  bool saves(uint32_t rank) const;  // the rank saves and takes part
  bool any() const;                 // some rank that takes part saves
  // The training's ranks that save: those that are there, and those that are gone but may have
  // parts in snapshots to come.
  std::vector<SaverStay> stays() const;
  bool any_lost_in(uint64_t round) const;  // a rank that saves took part in the round and is gone
  // The racks that have not yet said which of their ranks took part in the round.
  std::vector<uint32_t> racks_to_say(uint64_t round) const;

  // A rank is gone from every core. Returns whether it saved. `durable` is the last round that is
  // saved.
  bool lose(uint32_t rank, uint64_t durable);
  // Forgets ranks that are gone and that no snapshot will need.
  void forget(uint64_t durable);

  // A rack's news. check_news() throws Error: kInvalid, they name ranks of other racks;
  // kUnavailable, this box has a parent, which does not know yet that ranks save here.
  void check_news(uint32_t rank, const RackNews& news) const;
  void take_news(uint32_t rank, RackNews& news);

  // Below a parent: a rank that saves may join only when the parent knows that ranks save here.
  // Returns whether the parent is still to be told; false if there is no parent.
  bool must_tell_parent();
  void add_to_news(RackNews& news);  // adds this rack's savers. REQUIRES: there is a parent

 private:
  bool has_racks() const { return !job_.spec().rack_ranks.empty(); }

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  Seats& seats_;
  Uplink* const uplink_;
  std::vector<SaverStay> lost_;
  bool tells_parent_ = false;  // has told, or is telling, that ranks save
};

}  // namespace phub
