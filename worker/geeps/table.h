// A table as the cache keeps it: its rows in host memory, the log of its updates, and how far its
// exchange is.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/rows.h"

namespace phub::geeps {

// The updates of the clock that is not over, of an entry in host memory.
enum class HostLog : uint8_t {
  kOld,   // of a clock before
  kZero,  // no updates, and the memory says so
  kUsed,
};

struct Table {
  explicit Table(TableSpec s) : spec(std::move(s)), map(spec.keys), row_floats(spec.row_floats) {}
  Table(const Table&) = delete;
  Table(Table&&) = default;

  size_t floats() const { return spec.keys.size() * row_floats; }

  TableSpec spec;
  RowMap map;
  uint32_t row_floats;
  uint32_t partition = 0;
  size_t key = 0;  // of the exchange
  int32_t priority = 0;
  bool kept_twice = false;  // rows and log are memory of the cache's, not the exchange's
  HostMemory own_rows, own_log;
  const float* rows = nullptr;  // host memory
  float* log = nullptr;

  // Guarded by the cache's mutex.
  uint64_t clocks = 0;            // TableClocks
  uint64_t logged_clocks = 0;     // of these, whose log is complete in the host's memory
  uint64_t handed_over = 0;       // of these, pushed
  uint64_t version = 0;           // of these, whose result is in `rows`
  bool refreshing = false;        // `rows` are being replaced
  bool refreshed_unseen = false;  // the application's work has not waited for `refreshed` yet
  uint32_t moving = 0;            // fetches that are reading `rows`
  uint32_t jobs = 0;              // releases and clocks that were not worked off yet
  uint32_t held = 0;              // buffers that the application has
  uint64_t regular_from = 0;      // local: before this iteration, calls were left out or put in
  uint64_t changes = 0;           // local: saves from outside the sequence
  bool clocked_last = false;      // there was no other call after the last TableClock

  uint64_t pushed_ns = 0;  // with a trace

  // Of the reclaimer.
  std::vector<HostLog> loose_log;  // by row, of rows in no entry
  bool loose_rows = true;          // there are such

  std::unique_ptr<Event> fetched;    // the latest copy from `rows`
  std::unique_ptr<Event> refreshed;  // pinned rows are those of `version`
  std::unique_ptr<Event> gathered;   // kept twice: the latest reading of pinned rows
  std::unique_ptr<Event> clocked;    // the application's updates before the latest TableClock
  std::unique_ptr<Event> logged;     // what is logged so far is in the host's log
  std::unique_ptr<Event> saved;      // local: what was saved so far is in `rows`
};

}  // namespace phub::geeps
