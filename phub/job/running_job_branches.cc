// A running job: branches that are killed, and revived (job/branches.h).
//
// The files of one that is revived are read beside the control thread, into memory of their own.
// Other boxes that have parts of the job make memory for theirs, and fetch what it has. Then the
// boundary decides for a shelf, in whose dock that memory waits for every chunk, in each box. It is
// counted as long as it is there.
#include <fmt/format.h>

#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "phub/job/running_job.h"

namespace phub {

void RunningJob::check_may_kill() const {
  if (host_.checkpoints) return;
  fail(ErrorCode::kInvalid,
       "this server keeps no checkpoints, where a branch that is killed lies: start it with "
       "'phub serve --checkpoints DIR'");
}

void RunningJob::revive(const BranchChange& change, Reply<BranchReply> reply) {
  const uint32_t branch = change.branch;
  if (!membership_.branches().is_on_disk(branch)) {  // its shelf has it
    return decide_about_branches(change, 0, std::move(reply));
  }
  if (revived_) {
    fail(ErrorCode::kTaken, "branch {} is being revived: wait until it is",
         revived_->change.branch);
  }
  membership_.branches().check_room_for_one(lowest_needed());
  count_growth();
  const uint64_t bytes = Job::branch_bytes(job_->whole_plan(), job_->spec());
  if (!host_.budget.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "branch {} takes {} bytes beside its shelf while it is revived, for which the server has "
         "no room now: end another job, or raise --memory-limit",
         branch, bytes);
  }
  const auto revived = std::make_shared<Revived>(
      Revived{.change = change, .number = new_number(), .bytes = bytes, .reply = std::move(reply)});
  revived->change.is_loaded = true;
  revived_ = revived;
  count_growth();
  run_beside(
      host_.writer,
      [this, branch, revived] {
        revived->files = job_->make_branch();
        host_.checkpoints->read_branch(*job_, branch, revived->files);
      },
      [this, revived](const std::optional<Error>& failed) {
        if (ending_) return refuse_revival(error_code_, "the job has ended");
        if (failed) return refuse_revival(failed->code(), failed->what());
        share_branch(revived);
      });
}

void RunningJob::share_branch(const std::shared_ptr<Revived>& revived) {
  if (remote_.empty()) return decide_revival(revived);
  revived->is_shared = true;
  remote_.share_state({.number = revived->number, .set = true},
                      [this, revived](const std::optional<Error>& failed) {
                        if (ending_) return;
                        if (failed) return refuse_revival(failed->code(), failed->what());
                        std::vector<Job::Shelf> rest;
                        std::move(std::next(revived->files.begin()), revived->files.end(),
                                  std::back_inserter(rest));
                        revived->files.resize(1);
                        revived->bytes = job_->shelf_bytes();
                        free_beside(std::move(rest));
                        decide_revival(revived);
                      });
}

void RunningJob::decide_revival(const std::shared_ptr<Revived>& revived) {
  const auto answer = [this, revived,
                       reply = std::exchange(revived->reply, nullptr)](Result<BranchReply> result) {
    if (revived_ == revived) drop_revived();  // it was refused
    reply(std::move(result));
  };
  decide_about_branches(revived->change, 0, answer);
}

void RunningJob::refuse_revival(ErrorCode code, const std::string& why) {
  const Reply<BranchReply> reply = std::exchange(revived_->reply, nullptr);
  const uint32_t branch = revived_->change.branch;
  drop_revived();
  reply({code, fmt::format("branch {} cannot be revived: {}", branch, why)});
}

void RunningJob::drop_revived() {
  if (revived_->is_shared) remote_.drop_state(revived_->number);
  free_beside(std::move(revived_->files));
  revived_ = nullptr;
}

// Into the dock that an order of the boundary copies from, of which no core knows yet. Returns the
// number by which other boxes know what lies there; 0: there is none.
uint64_t RunningJob::place_revived(std::span<const BranchOrder> orders) {
  const uint32_t shelves = job_->spec().branches;
  for (const BranchOrder& order : orders) {
    if (order.kind != BranchOrder::kCopy || order.from <= shelves) continue;
    const std::shared_ptr<Revived> revived = std::exchange(revived_, nullptr);
    drop_shelf(job_->exchange_dock(order.from - shelves, std::move(revived->files.front())));
    return revived->number;
  }
  return 0;
}

void RunningJob::free_docks() {
  if (job_->docked_bytes() == 0) return;
  for (uint32_t shelf = 1; shelf <= job_->spec().branches; ++shelf) {
    const uint64_t in_progress = membership_.completed_round() + 1;
    if (!job_->has_dock(shelf) || membership_.branches().needs_dock(shelf, in_progress)) continue;
    drop_shelf(job_->exchange_dock(shelf, {}));
    remote_.free_dock(shelf);
  }
}

void RunningJob::drop_shelf(Job::Shelf shelf) {
  std::vector<Job::Shelf> one;
  one.push_back(std::move(shelf));
  free_beside(std::move(one));
}

// Memory is given back beside this thread.
void RunningJob::free_beside(std::vector<Job::Shelf> shelves) {
  std::erase_if(shelves, [](const Job::Shelf& shelf) { return shelf.arrays.empty(); });
  if (shelves.empty()) return;
  host_.builder.run([rest = std::make_shared<std::vector<Job::Shelf>>(
                         std::move(shelves))]() mutable { rest.reset(); });
}

// What another box fetches of it. Throws Error(kInvalid): nothing now.
SavedImage RunningJob::image_of_revived(uint64_t shard) const {
  const uint32_t box = remote_.at(shard).box;
  if (!ending_ && revived_ && revived_->is_shared && box < revived_->files.size()) {
    return revived_->files[box].image();
  }
  fail(ErrorCode::kInvalid, "job '{}' revives no branch now", job_->spec().name);
}

}  // namespace phub
