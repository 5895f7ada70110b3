// A worker's trace: the waits of its threads, and the exchange of each key from push to result.
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "transport/control/messages.h"
#include "transport/trace.h"

namespace phub {

// `%r` in a path becomes the rank; without one, ranks of a larger world get it as a suffix.
std::string trace_path_of(const std::string& path, uint32_t rank, uint32_t world_size);

// Not thread-safe: guarded by the worker's lock.
class WorkerTrace {
 public:
  // Opens the file. Throws Error(kInvalid).
  WorkerTrace(const std::string& path, const JoinReply& reply, size_t events);
  // Writes the file. Reports a failure on stderr.
  ~WorkerTrace();
  WorkerTrace(const WorkerTrace&) = delete;
  WorkerTrace& operator=(const WorkerTrace&) = delete;

  TraceLog& log() { return log_; }
  // A span of the calling thread that begins now; `key` may be TraceEvent::kNone.
  TraceEvent event(const char* name, size_t key, uint64_t round);
  // Adds a span of the calling thread from `begin_ns` to now.
  void add(const char* name, size_t key, uint64_t round, uint64_t begin_ns);

 private:
  uint16_t this_thread();

  TraceWriter writer_;
  TraceLog log_;
  const std::string job_;
  std::vector<std::string> keys_;
  std::vector<std::thread::id> threads_;  // by number
};

}  // namespace phub
