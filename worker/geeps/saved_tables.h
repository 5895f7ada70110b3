// The local tables in the rank's own state. A table's entry has its rows, f32 in the order of their
// keys, and then the table's digest. The application's thread calls all of this.
#pragma once

#include "worker/geeps/cache.h"
#include "worker/geeps/mover.h"
#include "worker/geeps/own_copies.h"

namespace phub::geeps {

// Throws Error(kInvalid) if the tables are larger than what a rank saves.
void check_saved_size(const Mover& mover);
void restore_local(Mover& mover);  // if something was saved
// Whether all tables are clocked in a round whose state is to be saved. REQUIRES: the cache's lock
// is held.
bool must_save(const Mover& mover);
// REQUIRES: local rows are not written by others than this thread.
RankState local_state(const Mover& mover, OwnCopies& copies);

}  // namespace phub::geeps
