// The trace of one job's chunks on a core, if a trace was asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/core/chunk_table.h"
#include "transport/trace.h"

namespace phub {

class CoreTrace {
 public:
  // Writes events to `log` from here on, with `job` as the job's number in it.
  void start(TraceLog& log, uint32_t core, uint32_t job, size_t chunks) {
    log_ = &log;
    core_ = static_cast<uint16_t>(core);
    job_ = job;
    first_arrival_.resize(chunks);
  }

  // A span from here to the end of the scope.
  TraceSpan span(const char* name, const CoreChunk& chunk) const {
    return {log_, log_ ? event(name, chunk.id, chunk.round) : TraceEvent()};
  }
  TraceSpan span(const char* name, const CoreChunk& chunk, uint64_t round, uint32_t rank) const {
    TraceEvent of_rank = log_ ? event(name, chunk.id, round) : TraceEvent();
    of_rank.rank = rank;
    return {log_, of_rank};
  }
  TraceSpan span(const char* name) const {
    return {log_, log_ ? event(name, TraceEvent::kNone, 0) : TraceEvent()};
  }

  // A contribution: the chunk waits from the first one to the last one.
  void arrival(uint32_t index, const CoreChunk& chunk, uint64_t round, uint32_t rank, bool first,
               bool last) {
    if (log_) write_arrival(index, chunk, round, rank, first, last);
  }

 private:
  TraceEvent event(const char* name, uint32_t chunk, uint64_t round) const {
    return {.name = name, .round = round, .subject = chunk, .job = job_, .thread = core_};
  }
  void write_arrival(uint32_t index, const CoreChunk& chunk, uint64_t round, uint32_t rank,
                     bool first, bool last) {
    TraceEvent arrival = event("arrival", chunk.id, round);
    arrival.kind = TraceEvent::Kind::kMoment;
    arrival.begin_ns = trace_now_ns();
    arrival.rank = rank;
    log_->add(arrival);
    if (first) first_arrival_[index] = arrival.begin_ns;
    if (!last) return;
    TraceEvent wait = event("wait for ranks", chunk.id, round);
    wait.kind = TraceEvent::Kind::kOverlapping;
    wait.begin_ns = first_arrival_[index];
    wait.duration_ns = arrival.begin_ns - wait.begin_ns;
    wait.rank = rank;  // the last one
    log_->add(wait);
  }

  TraceLog* log_ = nullptr;  // null: no trace
  uint16_t core_ = 0;
  uint32_t job_ = 0;
  std::vector<uint64_t> first_arrival_;  // by the chunk's index on the core
};

}  // namespace phub
