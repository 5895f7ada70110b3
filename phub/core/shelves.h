// A core's part of a job's branches: their states, and the orders that move them (branch_orders.h).
//
// A chunk carries out the orders before round R when it begins R: after the steps of the rounds
// before, and before the result of R − 1 is sent. So that result has the parameters of the branch
// with which R begins, on every transport; no rank reads the parameters that are replaced, as every
// rank has pushed; and a chunk in round R has carried out all orders up to R, so its round says
// all. Copies and sets that are still due before an earlier round are done first. Nothing allocates
// after construction.
//
// Out of lock-step a rank may be ahead of the round that a chunk is in, and of orders before its
// own round: the orders between give its round's branch, and the place of the branch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "phub/core/branch_orders.h"
#include "phub/core/chunk_table.h"
#include "phub/core/job_parameters.h"
#include "phub/core/moves.h"
#include "phub/core/places.h"
#include "phub/core/trace.h"

namespace phub {

class Way;

class Shelves {
 public:
  Shelves(const JobArrays& arrays, Places& places, ChunkTable& table, Moves& moves,
          const CoreTrace& trace)
      : steps_(arrays.shelves.steps),
        places_(places),
        table_(table),
        moves_(moves),
        trace_(trace) {}

  // Takes the orders at a boundary, ascending by round, with earlier orders that some chunk has not
  // carried out. They live until the next call. REQUIRES: no chunk has begun the round of a new
  // order.
  void take(std::span<const BranchOrder> orders) { orders_ = orders; }

  // The chunk is about to begin this round. Returns true if its parameters are no longer those that
  // the round before has made.
  bool before_round(uint32_t index, uint64_t round, Way& way) {
    const bool is_another = is_any_left(index) && carry_out(index, round, way);
    return set_in_skipped(index, round, way) || is_another;
  }
  // The branch of a round that the chunk may not have begun, by the orders so far.
  struct Ahead {
    uint32_t place = 0;
    uint64_t rounds = 0;     // the branch's, from the round in progress to the one before
    bool is_settled = true;  // no copy is ordered before the round that reads or makes it
  };
  Ahead ahead(uint32_t index, uint64_t round) const;
  // The optimizer's steps on a chunk of a branch that does not run.
  uint64_t& steps_of(uint32_t shelf, const CoreChunk& chunk) const {
    return steps_[shelf - 1][chunk.id];
  }
  // The round of the next order that the chunk has not carried out; kNever: none.
  uint64_t next_order(uint32_t index) const {
    if (!is_any_left(index)) return kNever;
    return std::ranges::upper_bound(orders_, table_[index].round, {}, &BranchOrder::round)->round;
  }

  // Bytes that were read and written for orders since this was asked last.
  uint64_t take_cost() { return std::exchange(cost_, 0); }

 private:
  bool is_any_left(uint32_t index) const {
    return !orders_.empty() && orders_.back().round > table_[index].round;
  }
  bool carry_out(uint32_t index, uint64_t round, Way& way);
  // A state is set when its round is closed. A skipped round is not closed, so this sets it now.
  bool set_in_skipped(uint32_t index, uint64_t round, const Way& way) {
    if (!moves_.sets_before(index, round)) return false;
    cost_ += moves_.make_before(index, round, way);
    return true;
  }
  void copy(const BranchOrder& order, uint32_t index, const Way& way);
  void swap(const BranchOrder& order, uint32_t index, Way& way);
  // The place that the branch at `place` will have, or had, on the other side of a swap.
  static uint32_t swapped(uint32_t place, const BranchOrder& order) {
    if (place == 0) return order.to;
    return place == order.to ? 0 : place;
  }

  const std::span<uint64_t* const> steps_;  // [shelf][chunk]
  Places& places_;
  ChunkTable& table_;
  Moves& moves_;
  const CoreTrace& trace_;
  std::span<const BranchOrder> orders_;
  uint64_t cost_ = 0;
};

}  // namespace phub
