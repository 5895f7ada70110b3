// The state of keys that ranks read or set, and branches that come from files, in a shard's part of
// a job. Before the boundary there is memory for a state, and what is set is there; behind it the
// cores copy, and what they have copied goes to the server. Control thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phub/background.h"
#include "phub/job/job_part.h"
#include "phub/job/memory.h"
#include "phub/shard/server_moves.h"
#include "phub/shard/state_share.h"
#include "transport/control/shard_messages.h"

namespace phub {

class ServedStates {
 public:
  // What a part says to the server of its job.
  class Reports {
   public:
    virtual ~Reports() = default;
    virtual ShardReport& report(ShardSays what) = 0;
    virtual void report_failed(std::string why) = 0;  // the job cannot go on here
  };

  // All of these outlive this. `number`: of the job at the server.
  ServedStates(uint64_t number, JobPart& job, ServerMoves& moves, Reports& reports,
               Background& builder, MemoryBudget& budget)
      : number_(number),
        job_(job),
        moves_(moves),
        reports_(reports),
        builder_(builder),
        budget_(budget) {}

  // As the server orders.
  void make(const ShardKeys& order);
  void drop(uint64_t state);
  void free_dock(uint64_t shelf);
  // Adds to the boundary what its cores copy. Throws Error(kInvalid): it is not there.
  void at_boundary(const ShardBoundary& order, Boundary& boundary);
  // A core has copied, of a get, or has taken what was set.
  void core_copied(uint32_t core, bool was_set);
  bool is_busy() const { return tasks_ > 0; }  // a thread has some memory of it
  // What all states take, for who frees the job: they are freed with it. REQUIRES: !is_busy().
  std::vector<std::shared_ptr<StateShare>> take() { return std::move(states_); }

 private:
  void refuse(uint64_t state, const Error& why);
  void is_there(StateShare& share);
  void drop(const std::shared_ptr<StateShare>& share);
  StateShare& find_for_boundary(uint64_t state, bool is_branch) const;
  void place_branch(const ShardBoundary& order);
  void drop_shelf(JobPart::Shelf shelf);
  void move(const std::shared_ptr<StateShare>& share);

  const uint64_t number_;
  JobPart& job_;
  ServerMoves& moves_;
  Reports& reports_;
  Background& builder_;
  MemoryBudget& budget_;
  std::vector<std::shared_ptr<StateShare>> states_;
  uint32_t tasks_ = 0;  // beside the control thread
};

}  // namespace phub
