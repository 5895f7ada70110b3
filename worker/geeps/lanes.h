// The lanes of a mover (mover.h).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/host_rows.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

struct Lane {
  enum class Kind : uint8_t { kFetch, kStore, kPush, kPull };
  Kind kind;
  std::unique_ptr<Stream> stream;  // null: kPush
  std::unique_ptr<HostRows> rows;
  uint32_t partition = 0;
  std::deque<Task> tasks = {};  // in the order of post() or, of kFetch, of the accesses' beginning
  bool due = false;             // the result of begin() may have changed
  uint64_t choices = 0;         // kStore: how often the next task was looked for
  // Of the latest tasks: so few are on the stream, and a task that is more urgent waits for no
  // more.
  std::array<std::unique_ptr<Event>, 2> enqueued = {};
  size_t next_enqueued = 0;
};

// Guarded by the cache's lock.
class Lanes {
 public:
  Lanes(Device& device, uint32_t partitions);

  std::vector<Lane>& all() { return lanes_; }
  Lane& of(Lane::Kind kind, uint32_t partition) {
    return lanes_[3 * partition + static_cast<size_t>(kind)];
  }
  Lane& of(Lane::Kind kind, const Table& table, uint32_t piece) {
    return of(kind, (table.first_partition + piece) % partitions_);
  }
  Lane& pull() { return lanes_.back(); }
  void make_due(Lane::Kind kind) {
    for (Lane& lane : lanes_) lane.due |= lane.kind == kind;
  }
  void make_all_due() {
    for (Lane& lane : lanes_) lane.due = true;
  }

 private:
  uint32_t partitions_;
  std::vector<Lane> lanes_;  // those of the partitions, then the pull lane
};

}  // namespace phub::geeps
