// The leases of a job's ranks, and their progress: the time that each may be silent, or be waited
// for, before it is lost. Part of Membership; it is told the time, and has no threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phub/core/messages.h"
#include "phub/job/rank_table.h"
#include "transport/control/messages.h"

namespace phub {

class Leases {
 public:
  using Ms = uint64_t;  // monotonic milliseconds

  Leases(const JobSpec& spec, const RankTable& ranks);  // they outlive this

  void set_now(Ms now) { now_ = now; }
  void begin(uint32_t rank, Ms now);  // the rank is admitted
  void renew(uint32_t rank, Ms now);  // a heartbeat. REQUIRES: the rank is live
  void end(uint32_t rank) { times_[rank].waited_since = 0; }

  // Every core has answered a probe: how many messages of each rank have ever come (chunks or parts
  // of them), and missing ranks.
  void probed(const std::vector<uint64_t>& sent, std::vector<uint64_t> waited_for, Ms now);
  std::vector<uint32_t> waiting_for() const;  // as the last probe saw it

  bool may_be_over(Ms now) const { return now > check_after_; }
  struct Over {
    uint32_t rank;
    std::string reason;
  };
  // The ranks whose lease or time without progress is over.
  std::vector<Over> check(Ms now);

  void add_to(std::vector<RankStatus>& statuses) const;  // by rank: its times

 private:
  struct Times {
    Ms lease_until = 0;
    Ms waited_since = 0;  // 0: no chunk waits for it
    uint64_t sent = 0;    // as of the latest probed()
  };
  const JobSpec& spec_;
  const RankTable& ranks_;
  std::vector<Times> times_;  // by rank
  std::vector<uint64_t> waited_for_;
  Ms now_ = 0;
  Ms check_after_ = kNever;  // no lease or time without progress ends before
};

}  // namespace phub
