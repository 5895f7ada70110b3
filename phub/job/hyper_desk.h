// The hyperparameters of a running job that ranks, and people, change. Control thread; the running
// job owns it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "phub/job/job_context.h"
#include "phub/job/save_desk.h"

namespace phub {

class HyperDesk {
 public:
  // `saves` outlives this.
  HyperDesk(const JobContext& context, const SaveDesk& saves);

  // Below a parent the change is for the parent's job. Throws Error.
  void set(uint32_t rank, const HyperChange& change, Reply<HyperReply> reply);

  // Throw Error: these values cannot change; there is no room for further changes.
  void check(const std::map<std::string, double>& values) const;
  void check_room() const;
  // Of the rounds for which changes were decided, the first that somebody may still ask for.
  uint64_t lowest_needed() const;

 private:
  Job& job_;
  Membership& membership_;
  const Seats& seats_;
  Uplink* const uplink_;
  Requests& requests_;
  JobDriver& driver_;
  const SaveDesk& saves_;
};

}  // namespace phub
