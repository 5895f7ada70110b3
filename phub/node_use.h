// How much a server's nodes, cores and NICs are used. Control thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/jobs.h"
#include "phub/machine.h"

namespace phub {

class NodeUse {
 public:
  // Both outlive this.
  NodeUse(const Machine& machine, JobHost& host) : machine_(machine), host_(host) {}

  // Takes the cores' rates, if the latest are old enough.
  void sample(uint64_t now_ms);
  // The nodes that have a core or a NIC in use. Totals are of all jobs so far, rates of `present`.
  std::vector<NodeStatus> status(const Jobs::ByName& present) const;

 private:
  const Machine& machine_;
  JobHost& host_;
  uint64_t sampled_ms_ = 0;
};

}  // namespace phub
