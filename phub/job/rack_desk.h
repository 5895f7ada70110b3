// A rack's running job at its parent: the rack's messages to the parent, the parent's answers, and
// the connection to the parent, which is made again when it broke.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/passed_state.h"
#include "phub/job/savers.h"

namespace phub {

class RackDesk {
 public:
  // `savers` outlives this. REQUIRES: context.uplink
  RackDesk(const JobContext& context, Savers& savers);

  void begin();  // from now on the job ends when the parent's does
  void tick();   // tells the parent the news, and does other periodic work there
  // `error` is the job's; "": all ranks have left.
  void end(const std::string& error);

  StateDesk& states() { return states_; }
  // Says which rank of this rack sent a NaN or Inf, for which the parent will end the job.
  void explain_nonfinite(std::string what) { nonfinite_ = std::move(what); }
  // Delays the join of a rank that saves, until the parent knows that ranks save here.
  void delay_join(uint64_t token, int32_t rank, bool replace);
  // Returns a reply that answers `reply` after the parent's barrier, which follows that of this
  // rack.
  Reply<Done> above(Reply<Done> reply);

  void link_broke();
  // A core has stopped using the connection to the parent, or uses the new one.
  void core_answered(CoreReport::Type type);

 private:
  void reconnect();
  void admit_delayed();

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  const Seats& seats_;
  Part& local_;
  Uplink& uplink_;
  JobDriver& driver_;
  Savers& savers_;
  PassedState states_;
  enum class Link { kFine, kStopping, kMissing, kResuming } link_ = Link::kFine;
  uint32_t answers_ = 0;      // from cores that stop using the link or go on
  bool broke_again_ = false;  // before all cores went on
  std::string nonfinite_;
  RackNews news_;
  struct Delayed {
    uint64_t token;
    int32_t rank;
    bool replace;
  };
  std::vector<Delayed> delayed_;
};

}  // namespace phub
