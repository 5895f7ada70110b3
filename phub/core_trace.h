// What a core writes down of one job's chunks, where somebody asked for a trace.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core_messages.h"
#include "transport/trace.h"

namespace phub {

class CoreTrace {
 public:
  CoreTrace(TraceLog& log, uint32_t core, uint32_t job, size_t chunks)
      : log_(log), core_(static_cast<uint16_t>(core)), job_(job), first_arrival_(chunks) {}

  TraceLog* log() { return &log_; }
  TraceEvent event(const char* name, uint32_t chunk, uint64_t round) const {
    return {.name = name, .round = round, .subject = chunk, .job = job_, .thread = core_};
  }

  // A contribution: the chunk waits from the first one to the last one.
  void arrival(uint32_t index, uint32_t chunk, uint64_t round, uint32_t rank, bool first,
               bool last) {
    TraceEvent arrival = event("arrival", chunk, round);
    arrival.kind = TraceEvent::Kind::kMoment;
    arrival.begin_ns = trace_now_ns();
    arrival.rank = rank;
    log_.add(arrival);
    if (first) first_arrival_[index] = arrival.begin_ns;
    if (!last) return;
    TraceEvent wait = event("wait for ranks", chunk, round);
    wait.kind = TraceEvent::Kind::kOverlapping;
    wait.begin_ns = first_arrival_[index];
    wait.duration_ns = arrival.begin_ns - wait.begin_ns;
    wait.rank = rank;  // the last one
    log_.add(wait);
  }

 private:
  TraceLog& log_;
  const uint16_t core_;
  const uint32_t job_;
  std::vector<uint64_t> first_arrival_;  // by the chunk's index on the core
};

}  // namespace phub
