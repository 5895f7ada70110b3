// The server's trace: a log for each core, and the names of jobs and keys, which outlive the jobs.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "phub/job/job.h"
#include "transport/trace.h"

namespace phub {

class ServerTrace {
 public:
  static constexpr size_t kJobs = 64;  // the number of latest jobs whose names are kept

  ServerTrace(uint32_t cores, size_t events_per_core);

  TraceLog& log(uint32_t core) { return logs_[core]; }
  uint32_t add_job(const Job& job);  // returns its number in the events
  // REQUIRES: the cores' threads have ended.
  void write(TraceWriter& writer) const;

 private:
  struct Names {
    uint32_t number = 0;
    std::string job;
    std::vector<std::string> keys;
    std::vector<uint32_t> first_chunk;  // each key's, ascending
  };
  const Names* names_of(uint32_t job) const;
  static std::string chunk_name(const Names& names, uint32_t chunk);

  std::vector<TraceLog> logs_;
  std::deque<Names> jobs_;
  uint32_t next_job_ = 0;
};

}  // namespace phub
