// Who holds a job up, by rank and key, as the server sees it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/messages.h"

namespace phub {

// A rank that has sent nothing while others, who have sent theirs, wait for a key of it.
struct Stall {
  uint32_t rank = 0;
  std::string key;  // of the oldest chunk that is waited for
  uint64_t round = 0;
  uint64_t chunks = 0;
  double seconds = 0;  // since it sent anything

  friend bool operator==(const Stall&, const Stall&) = default;
};

// Those that are not shorter than `least_s`.
std::vector<Stall> stalls_of(const JobStatus& job, double least_s);

// "rank 1 has not sent key 'w2' of round 3"
std::string describe(const Stall& stall);

}  // namespace phub
