// The conditions under which a mover's tasks and accesses begin (mover.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "worker/geeps/follower.h"
#include "worker/geeps/schedule.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

// It asks, and changes nothing. REQUIRES: the caller holds the cache's lock.
class Conditions {
 public:
  // All of these outlive this.
  Conditions(const std::vector<Table>& tables, const std::optional<Schedule>& schedule,
             const Follower& follower)
      : tables_(tables), schedule_(schedule), follower_(follower) {}

  bool can_begin(const Task& task) const;  // whatever the tasks before it do
  bool can_fill(const Instance& instance) const;
  // Whether the parts of its fill begin when the rows of their pieces are ready.
  bool fills_by_piece(const Instance& instance) const;
  bool memory_is_free(const Instance& instance) const;
  // Whether the instance's buffer still has the rows of the access before it, and they are fresh
  // enough. REQUIRES: that access was released.
  bool is_kept(const Instance& instance, uint64_t back) const;
  // Whether the table's rows may be read. Local rows: their saves have completed. Parameters: they
  // are at most `back` clocks older than the clock that is `ahead` clocks from now.
  bool rows_are_ready(const Table& table, uint64_t back, uint64_t ahead = 0) const;

 private:
  uint64_t clocks_ahead(const Instance& instance) const;

  const std::vector<Table>& tables_;
  const std::optional<Schedule>& schedule_;
  const Follower& follower_;
};

}  // namespace phub::geeps
