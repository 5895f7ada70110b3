// Finds the limit that bound a measured exchange, and the change that would help. A pure function
// of measured figures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

// A limit of the rounds.
enum class Bound {
  kMemory,      // bandwidth of the memory that the server sums in
  kNetwork,     // a worker's link
  kStraggler,   // one rank that is slower than the others
  kProcessors,  // all processors of this machine
  kCores,       // the server's cores, or one of them, while the machine has others
  kWakeups,     // sleeping and waking
  kUnknown,     // none of these, or the figures were not measured
};

struct Measured {
  uint32_t workers = 1;
  double round_us = 0;                 // median
  std::optional<double> memory_us;     // memory alone, for the same reads and writes
  std::optional<double> network_us;    // a worker's link alone, for one direction
  std::vector<double> core_busy;       // per core of the server: fraction of the rounds it ran
  std::vector<double> core_waited;     // per core: fraction in which it waited for a processor
  std::optional<double> machine_busy;  // all processors: fraction of the rounds they ran
  std::optional<double> wakeups;       // in a round, one after another
  double wakeup_us = 0;                // the time of one
  std::vector<double> done_us;    // per rank, usual_mean(): from a round's start to its results
  std::vector<double> pushed_us;  // per rank, the same until it had pushed everything
};

struct Share {  // the fraction of a round that a limit accounts for, 0 … 1
  Bound bound;
  double share;
};

struct Verdict {
  Bound bound = Bound::kUnknown;
  std::string because;        // one line with the figure
  std::vector<Share> shares;  // all that were measured, the largest first
};

// REQUIRES: m.round_us > 0.
Verdict judge(const Measured& m);

std::string_view name_of(Bound bound);  // "memory bandwidth", for people
std::string_view word_of(Bound bound);  // "memory", for programs
std::string_view advice(Bound bound);   // the change that helps, in a sentence or two

}  // namespace phub
