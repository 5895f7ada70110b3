// The speed of a job, and the traffic of its cores and NICs, from the cores' answers to probes.
// Control thread only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/messages.h"
#include "phub/plan/plan.h"
#include "transport/control/messages.h"

namespace phub {

inline constexpr uint64_t kRateMs = 1000;  // the interval of a rate

struct CoreMeter {
  Flow flow;
  uint64_t asleep_ns = 0;
  double awake = 0;
};
struct NicMeter {
  uint32_t os_node = 0;
  Flow flow;
};
// The box's traffic, of all jobs so far together; without rates.
struct BoxMeters {
  std::vector<CoreMeter> cores;
  std::map<std::pair<std::string, std::string>, NicMeter> nics;  // by transport and name
};

class JobMeter {
 public:
  // `cores` are the server's, by core of the plan; further ones are other boxes'. Plan, spec and
  // meters of the box outlive this.
  JobMeter(const Plan& plan, const JobSpec& spec, std::string transport,
           std::vector<uint32_t> cores, BoxMeters& box, uint64_t now_ms);

  Probe& probe(uint32_t core) { return probes_[core]; }  // by core of the plan, which fills this in
  // The answers of all cores to the last probe, together. A rank is waited for if it lacks in the
  // lowest round in which any rank does.
  Probe collect(uint64_t now_ms);
  // Adds the traffic of the queues since the last call to the meters of the box.
  void count_flow();

  void add_rates(BoxMeters& to) const;
  void add_to(JobStatus& status) const;

 private:
  // The traffic of a queue, as last seen and when its rate was taken last.
  struct QueueMeter {
    QueueCounters seen, before;
    Flow flow;
  };
  NicMeter& nic_meter(BoxMeters& box, const QueuePlan& queue) const;
  void measure_rates(uint64_t chunks_completed, double seconds);

  const Plan& plan_;
  const JobSpec& spec_;
  const std::string transport_;
  const std::vector<uint32_t> cores_;
  BoxMeters& box_;
  std::vector<Probe> probes_;
  std::vector<QueueMeter> queues_;  // by queue of the plan
  std::vector<Lack> lacks_;         // per rank
  std::vector<uint64_t> arrivals_;  // per rank
  EndpointCounters endpoints_;
  std::vector<EndpointCounters> core_endpoints_;
  uint64_t chunks_completed_ = 0;
  uint64_t switch_chunks_ = 0;
  uint64_t chunks_before_ = 0;  // as of the latest rates
  double rounds_per_s_ = 0;
  uint64_t rate_ms_;
};

}  // namespace phub
