// The memberships of a rack in the jobs of its parent, as far as they live: those of its jobs, and
// of jobs that are being made. Control thread only.
#pragma once

#include <memory>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/parent.h"
#include "phub/task.h"

namespace phub {

class Uplinks {
 public:
  // Both outlive this. `parent` is null if the server has none: then none of these is called.
  Uplinks(Parent* parent, JobHost& host) : parent_(parent), host_(host) {}

  // A rack's job is made when the parent has admitted the rack: its plan and its first round follow
  // from the parent's.
  Task<std::shared_ptr<Uplink>> join(std::shared_ptr<JoinRequest> join);
  void poll();
  void drop();  // the server ends

 private:
  Parent* const parent_;
  JobHost& host_;
  std::vector<std::weak_ptr<Uplink>> uplinks_;
};

}  // namespace phub
