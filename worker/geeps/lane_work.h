// The work of a mover's tasks (mover.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/cache_trace.h"
#include "worker/geeps/lanes.h"
#include "worker/geeps/schedule.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

// It runs in a lane, between the mover's begin() and finish(), without the cache's lock: the order
// of the tasks gives it the rows and logs alone.
class LaneWork {
 public:
  // All of these outlive this; nothing is traced while `trace` is null.
  LaneWork(Exchange& exchange, const CacheOptions& options, std::vector<Table>& tables,
           std::optional<Schedule>& schedule, const std::unique_ptr<CacheTrace>& trace)
      : exchange_(exchange),
        options_(options),
        tables_(tables),
        schedule_(schedule),
        trace_(trace) {}

  void run(Lane& lane, Task& task);
  // Completes a piece's log, of a clock with updates, in host memory.
  void complete_log(HostRows& rows, uint32_t table, uint32_t piece,
                    const std::vector<uint32_t>& used_logs, StagedBuffers& staged);

 private:
  void fill(Lane& lane, Task& task);
  void store(Lane& lane, Task& task);
  void store_clock(Lane& lane, Task& task);
  void end_release(Stream& stream, const Task& task);
  void poison(Stream& stream, const Task& task);
  void log(HostRows& rows, Table& table, const HostPart& part, const StoredBuffer& buffer);
  void push(Task& task);
  void pull(Lane& lane, Task& task);
  // Calls `enqueue`, which enqueues work on the stream. A trace gets the time of the work on the
  // device.
  void traced(Stream& stream, CacheTrack track, const char* name, const Task& task,
              const std::function<void()>& enqueue);

  Exchange& exchange_;
  const CacheOptions& options_;
  std::vector<Table>& tables_;
  std::optional<Schedule>& schedule_;
  const std::unique_ptr<CacheTrace>& trace_;
};

}  // namespace phub::geeps
