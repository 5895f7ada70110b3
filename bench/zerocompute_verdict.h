// Which limit a measured exchange ran into, and what to change. A pure function of measured
// figures; how they are measured is the business of others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

// What bound the rounds.
enum class Bound {
  kMemory,      // bandwidth of the memory that the server sums in
  kNetwork,     // a worker's link
  kStraggler,   // one rank that is slower than the others
  kProcessors,  // all processors of this machine
  kCores,       // the server's cores, or one of them, while the machine has others
  kWakeups,     // sleeping and waking
  kUnknown,     // none of them, or what would say so was not measured
};

struct Measured {
  uint32_t workers = 1;
  double round_us = 0;                 // median
  std::optional<double> memory_us;     // what the memory needs for the same reads and writes
  std::optional<double> network_us;    // what a worker's link needs for one direction
  std::vector<double> core_busy;       // per core of the server: part of the rounds that it ran
  std::vector<double> core_waited;     // and that it could have run, had there been a processor
  std::optional<double> machine_busy;  // all processors: part of the rounds that they ran
  std::optional<double> wakeups;       // in a round, one after another
  double wakeup_us = 0;                // of one
  std::vector<double> done_us;         // per rank, usual: from the round's start to its results
  std::vector<double> pushed_us;       // and until it had pushed everything
};

struct Share {  // how much of a round one limit accounts for, 0 … 1
  Bound bound;
  double share;
};

struct Verdict {
  Bound bound = Bound::kUnknown;
  std::string because;        // one line: the figure that says so
  std::vector<Share> shares;  // all that were measured, the largest first
};

// REQUIRES: m.round_us > 0.
Verdict judge(const Measured& m);

std::string_view name_of(Bound bound);  // "memory bandwidth", for people
std::string_view word_of(Bound bound);  // "memory", for programs
std::string_view advice(Bound bound);   // what to change, in a sentence or two

}  // namespace phub
