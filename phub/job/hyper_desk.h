// Changes of a running job's hyperparameters, by ranks and by people. Control thread; the running
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

  // These throw Error: the values cannot change; there is no room for further changes.
  void check(const std::map<std::string, double>& values, bool of_fork = false) const;
  void check_room() const;
  // The first round for which changes were decided and may still be asked for.
  uint64_t lowest_needed() const;

 private:
  Job& job_;
  Membership& membership_;
  const Seats& seats_;
  Uplink* const uplink_;
  const bool has_standby_;
  Requests& requests_;
  JobDriver& driver_;
  const SaveDesk& saves_;
};

}  // namespace phub
