// The local tables of a cache that have rows of their own for each branch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/cache_waits.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/mover.h"
#include "worker/geeps/own_copies.h"

namespace phub::geeps {

// Knows the round that is in progress and the branch that runs in it. At the end of a round it
// gives the tables the rows of the branch that runs in the next one. A cache owns it, and the
// application's thread calls it.
class BranchTables {
 public:
  // REQUIRES: the arguments outlive this.
  BranchTables(Mover& mover, CacheWaits& waits, OwnCopies& copies)
      : mover_(mover), waits_(waits), copies_(copies) {}

  // REQUIRES: there is no sequence yet, and local tables are restored.
  void begin();
  bool any() const { return any_; }  // the job has branches, and there are such tables
  // Whether the table is clocked in this round: it may not be again before the round ends.
  bool is_clocked(const Table& table) const { return any_ && table.clocks > rounds_; }
  // Whether all tables are clocked in this round; false: none is. Throws Error(kInvalid): some are.
  // REQUIRES: the lock is held.
  bool all_are_clocked() const;
  uint64_t next_round() const { return rounds_ + 1; }
  // REQUIRES: the results of all clocked updates are here.
  void begin_next_round(const Exchange::Branches& at);
  // The entries of the rank's own state.
  std::map<std::string, std::vector<std::byte>> saved() const;

 private:
  bool load();
  void enter(const Exchange::Branches& at);
  void hold_fills();
  void go_on_with_rows();

  Mover& mover_;
  CacheWaits& waits_;
  OwnCopies& copies_;
  bool any_ = false;
  uint64_t rounds_ = 0;      // that have ended
  uint32_t branch_ = 0;      // the branch whose rows the tables have
  uint64_t forks_from_ = 1;  // forks before earlier rounds are known
};

}  // namespace phub::geeps
