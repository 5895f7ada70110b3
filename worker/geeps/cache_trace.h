// The cache's trace, by table: computation, waits, copies, pushes and pulls.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transport/trace.h"

namespace phub::geeps {

enum class CacheTrack : uint16_t { kCompute, kWait, kToDevice, kToHost, kPush, kPull };

// Thread-safe. The destructor writes the file.
class CacheTrace {
 public:
  // Throws Error(kInvalid) if the file cannot be opened.
  CacheTrace(const std::string& path, uint32_t rank, std::vector<std::string> tables);
  ~CacheTrace();
  CacheTrace(const CacheTrace&) = delete;
  CacheTrace& operator=(const CacheTrace&) = delete;

  // Adds a span from `begin_ns` (trace_now_ns()) to now.
  void add(CacheTrack track, const char* name, uint32_t table, uint64_t clock, uint64_t begin_ns);

 private:
  std::mutex mutex_;
  TraceWriter writer_;
  TraceLog log_;
  uint32_t rank_;
  std::vector<std::string> tables_;
};

}  // namespace phub::geeps
