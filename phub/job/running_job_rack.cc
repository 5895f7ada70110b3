// A running job of a rack: what it passes on to the parent's job, and what comes from there.
#include <fmt/format.h>

#include <utility>

#include "phub/job/running_job.h"

namespace phub {

void RunningJob::follow_parent() {
  uplink_->on_end([this](const Error& why) {
    if (ending_) return;
    const std::string found = std::exchange(nonfinite_, "");
    const bool explains = why.code() == ErrorCode::kNonFinite && !found.empty();
    membership_.parent_ended(why.code(),
                             explains ? fmt::format("{} ({})", found, why.what()) : why.what());
    carry_out();
  });
}

void RunningJob::end_at_parent() {
  if (!uplink_) return;
  if (error_.empty()) {
    uplink_->leave();
  } else {
    uplink_->abandon();
  }
}

// The parent's job may have ended: then it says why. Else only the connection is broken.
void RunningJob::parent_broke() {
  uplink_->check([this] {
    if (ending_) return;
    membership_.parent_ended(
        ErrorCode::kUnavailable,
        fmt::format("the connection to the parent at {} broke", uplink_->parent()));
    carry_out();
  });
}

Reply<Done> RunningJob::after_parents_barrier(Reply<Done> reply) {
  if (!uplink_) return reply;
  return [this, reply = std::move(reply)](const Result<Done>& here) {
    here ? uplink_->barrier(reply) : reply(here);
  };
}

}  // namespace phub
