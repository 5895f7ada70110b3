// Copies of rows that the application's thread makes itself.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/device_work.h"
#include "worker/geeps/mover.h"

namespace phub::geeps {

// Has a lane of its own, for what no lane of the mover does: accesses outside the sequence, and
// rows that move when the sequence changes, or between two rounds. A cache owns it, and the
// application's thread calls it.
class OwnCopies {
 public:
  // REQUIRES: the arguments outlive this.
  OwnCopies(Device& device, Mover& mover, DeviceWork& work);

  // A task of Mover::fill_task().
  void run(Task& task) { mover_.work.run(lane_, task); }
  void await();  // all of its copies

  // Saves rows that are newer in device memory to host memory. Returns, by table, whether its log
  // holds updates.
  std::vector<bool> save_dirty();
  using Tables = std::function<bool(const Table& table)>;
  // Copies local rows of these tables that are newer in device memory to host memory, and waits
  // until the tables' memory has all that was saved. REQUIRES: the cache's lock is not held.
  void settle(const Tables& of);
  // Fills pinned rows from host memory. `unclocked`: by table, whether its log holds updates.
  void load_pinned(const std::vector<bool>& unclocked);
  // Does the same for these local tables, whose memory has other rows now. REQUIRES: there is a
  // schedule.
  void load_pinned_of(const Tables& of);

  uint64_t moved_bytes() const { return lane_.rows->moved_bytes(); }

 private:
  void store_dirty(const Tables& of);

  Mover& mover_;
  DeviceWork& work_;
  Lane lane_;
};

}  // namespace phub::geeps
