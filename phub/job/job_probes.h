// The probes of a running job: when its cores are asked how far they are, and what becomes of their
// answers. The running job owns it. Control thread.
#pragma once

#include <cstdint>
#include <span>

#include "phub/clock.h"
#include "phub/job/job.h"
#include "phub/job/meter.h"
#include "phub/job/part.h"

namespace phub {

class JobProbes {
 public:
  // All of these outlive this.
  JobProbes(Job& job, JobMeter& meter, std::span<Part* const> everywhere, const Clock& clock,
            const ServedTime& time)
      : job_(job), meter_(meter), everywhere_(everywhere), clock_(clock), time_(time) {}

  // Asks the cores if something has happened, and no more often than takes a hundredth of their
  // time, as they look at every chunk for it.
  void tick(uint64_t now);
  void answered() {  // a core has
    if (--out_ == 0) collect();
  }
  // The rates are 0 after a while without activity.
  bool rates_fade(uint64_t now) const { return now - active_ms_ < kRatesFadeMs; }

 private:
  // After the last round the rates are taken until they are 0.
  static constexpr uint64_t kRatesFadeMs = 3000;

  void collect();

  Job& job_;
  JobMeter& meter_;
  const std::span<Part* const> everywhere_;
  const Clock& clock_;
  const ServedTime& time_;
  uint32_t out_ = 0;  // cores that have not answered
  uint64_t next_ms_ = 0;
  uint64_t active_ms_ = 0;  // the latest time at which the job was seen active
};

}  // namespace phub
