// The choice of a lane's next task (mover.h).
#pragma once

#include <deque>
#include <vector>

#include "worker/geeps/conditions.h"
#include "worker/geeps/lanes.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

// The task of the lane that begins now, or the end of its tasks. REQUIRES: the caller holds the
// cache's lock.
std::deque<Task>::iterator next_task(Lane& lane, const Conditions& conditions,
                                     std::vector<Table>& tables);

}  // namespace phub::geeps
