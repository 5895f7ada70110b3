// The memberships of this box in jobs of another one, as far as they live: a rack's in those of its
// parent, a source's in those of its standby. They are of its jobs, and of jobs that are being
// made. Control thread only.
#pragma once

#include <memory>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/parent.h"
#include "phub/task.h"

namespace phub {

class Uplinks {
 public:
  // All outlive this. Both are null if the server has none: then none of these is called. It has
  // one of them at most.
  Uplinks(Parent* parent, Parent* standby, JobHost& host)
      : parent_(parent ? parent : standby), is_standby_(standby != nullptr), host_(host) {}

  // A rack's job is made when the parent has admitted the rack: its plan and its first round follow
  // from the parent's. So it is with a job that has a standby.
  Task<std::shared_ptr<Uplink>> join(std::shared_ptr<JoinRequest> join);
  void poll();
  void drop();  // the server ends

 private:
  Parent* const parent_;
  const bool is_standby_;
  JobHost& host_;
  std::vector<std::weak_ptr<Uplink>> uplinks_;
};

}  // namespace phub
