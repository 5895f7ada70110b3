// Whether the switch of a running job takes its chunks now. The running job owns it. Control
// thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "phub/clock.h"
#include "phub/core/messages.h"
#include "phub/job/job.h"
#include "phub/notes.h"
#include "transport/control/messages.h"

namespace phub {

class SwitchUse {
 public:
  // All of these outlive this.
  SwitchUse(const Job& job, Notes& notes, const Clock& clock)
      : job_(job), notes_(notes), clock_(clock) {}

  void changed(const CoreReport& report);  // kSwitchEnded, kSwitchBegun
  void add_to(JobStatus& status) const;

 private:
  const Job& job_;
  Notes& notes_;
  const Clock& clock_;
  std::map<uint32_t, std::string> ended_;  // by core that takes no sums now: the reason
};

}  // namespace phub
