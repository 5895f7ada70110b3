// A running job: branches that are killed, and revived (job/branches.h).
//
// The files of one that is revived are read beside the control thread, into memory of their own.
// Then the boundary decides for a shelf, in whose dock that memory waits for every chunk. It is
// counted as long as it is there.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "phub/job/running_job.h"

namespace phub {
namespace {

constexpr const char* kOneBox =
    "the job has parts on other boxes, and these cannot fetch a branch from files";

}  // namespace

void RunningJob::check_may_kill() const {
  if (!host_.checkpoints) {
    fail(ErrorCode::kInvalid,
         "this server keeps no checkpoints, where a branch that is killed lies: start it with "
         "'phub serve --checkpoints DIR'");
  }
  if (has_remote_parts()) fail(ErrorCode::kInvalid, "no branch can be killed: {}", kOneBox);
}

void RunningJob::revive(const BranchChange& change, Reply<BranchReply> reply) {
  const uint32_t branch = change.branch;
  if (!membership_.branches().is_on_disk(branch)) {  // its shelf has it
    return decide_about_branches(change, 0, std::move(reply));
  }
  if (has_remote_parts()) fail(ErrorCode::kInvalid, "branch {}: {}", branch, kOneBox);
  if (!loaded_.empty()) {
    fail(ErrorCode::kTaken, "branch {} is being revived: wait until it is", loaded_.begin()->first);
  }
  membership_.branches().check_room_for_one();
  count_growth();
  const uint64_t bytes = job_->shelf_bytes();
  if (!host_.budget.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "branch {} takes {} bytes beside its shelf while it is revived, for which the server has "
         "no room now: end another job, or raise --memory-limit",
         branch, bytes);
  }
  loaded_[branch];
  count_growth();
  const auto answer = [this, branch, reply = std::move(reply)](Result<BranchReply> result) {
    if (const auto left = loaded_.find(branch); left != loaded_.end()) {  // it was refused
      drop_shelf(std::move(left->second));
      loaded_.erase(left);
    }
    reply(std::move(result));
  };
  const auto shelf = std::make_shared<Job::Shelf>();
  run_beside(
      host_.writer,
      [this, branch, shelf] {
        *shelf = job_->make_shelf();
        host_.checkpoints->read_branch(*job_, branch, *shelf);
      },
      [this, change, shelf, answer](const std::optional<Error>& failed) {
        if (ending_ || failed) drop_shelf(std::move(*shelf));
        if (ending_) return answer({error_code_, "the job has ended"});
        if (failed) {
          return answer({failed->code(), fmt::format("branch {} cannot be revived: {}",
                                                     change.branch, failed->what())});
        }
        loaded_[change.branch] = std::move(*shelf);
        BranchChange loaded = change;
        loaded.is_loaded = true;
        decide_about_branches(loaded, 0, answer);
      });
}

// Into the docks that the boundary's orders copy from. No core has these orders yet.
void RunningJob::place_loaded(std::span<const BranchOrder> orders) {
  const uint32_t shelves = job_->spec().branches;
  for (const BranchOrder& order : orders) {
    if (order.kind != BranchOrder::kCopy || order.from <= shelves) continue;
    auto loaded = loaded_.extract(order.child);
    drop_shelf(job_->exchange_dock(order.from - shelves, std::move(loaded.mapped())));
  }
}

void RunningJob::free_docks() {
  if (job_->docked_bytes() == 0) return;
  for (uint32_t shelf = 1; shelf <= job_->spec().branches; ++shelf) {
    const uint64_t in_progress = membership_.completed_round() + 1;
    if (!job_->has_dock(shelf) || membership_.branches().needs_dock(shelf, in_progress)) continue;
    drop_shelf(job_->exchange_dock(shelf, {}));
  }
}

// Memory is given back beside this thread.
void RunningJob::drop_shelf(Job::Shelf shelf) {
  if (shelf.arrays.empty()) return;
  host_.builder.run(
      [rest = std::make_shared<Job::Shelf>(std::move(shelf))]() mutable { rest.reset(); });
}

uint64_t RunningJob::loaded_bytes() const { return loaded_.size() * job_->shelf_bytes(); }

}  // namespace phub
