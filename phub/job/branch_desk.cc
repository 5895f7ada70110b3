#include "phub/job/branch_desk.h"

#include <fmt/format.h>

#include <iterator>
#include <limits>
#include <utility>

namespace phub {

BranchDesk::BranchDesk(const JobContext& context, const HyperDesk& hyper)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      branches_(membership_.changes().decisions().branches()),
      remote_(context.remote),
      life_(context.life),
      requests_(context.requests),
      driver_(context.driver),
      hyper_(hyper) {}

void BranchDesk::change(const BranchChange& change, Reply<BranchReply> reply) {
  if (job_.spec().branches == 0) {
    fail(ErrorCode::kInvalid, "job '{}' has no branches: create it with `branches` above 0",
         job_.spec().name);
  }
  if (change.action == BranchAction::kList) return reply(list());
  if (!losses_.empty()) losses_.learn(branches_.runs(0));
  hyper_.check(change.values, change.action == BranchAction::kFork);
  if (change.action == BranchAction::kSchedule) hyper_.check_room();
  if (change.action == BranchAction::kKill) check_may_kill();
  if (change.action == BranchAction::kRevive) return revive(change, std::move(reply));
  const uint32_t child = change.action == BranchAction::kFork ? branches_.next() : 0;
  decide(change, child, std::move(reply));
}

BranchReply BranchDesk::list() const {
  const uint64_t in_progress = membership_.rounds().completed() + 1;
  return {.branches = branches_.list(in_progress),
          .runs = branches_.runs(in_progress),
          .forks = branches_.forks(in_progress),
          .batches = job_.hyper().view().batches(in_progress),
          .gone = branches_.gone(in_progress)};
}

void BranchDesk::check_may_kill() const {
  if (!box_has_state(job_.spec())) {
    fail(
        ErrorCode::kInvalid,
        "job '{}' has no optimizer: its branches are states of the ranks, of which this server has "
        "no files. Leave the branch, or discard it",
        job_.spec().name);
  }
  if (job_.spec().saved == Saved::kNo) {
    fail(ErrorCode::kInvalid,
         "job '{}' is not saved, and a branch that is killed lies with its checkpoints: leave out "
         "saved 'no'",
         job_.spec().name);
  }
  if (host_.checkpoints) return;
  fail(ErrorCode::kInvalid,
       "this server keeps no checkpoints, where a branch that is killed lies: start it with "
       "'phub serve --checkpoints DIR'");
}

void BranchDesk::decide(const BranchChange& change, uint32_t child, Reply<BranchReply> reply) {
  const uint64_t token = requests_.expect(std::move(reply), [this, child](uint64_t round) {
    BranchReply made = list();
    made.round = round;
    made.branch = child;
    return made;
  });
  membership_.changes().decide(token, change, child);
  driver_.carry_out();
}

void BranchDesk::report_loss(const LossRequest& report) {
  // The membership knows of complete rounds as of the latest look at the cores.
  constexpr uint64_t kMostAhead = uint64_t{1} << 20;
  losses_.learn(branches_.runs(0));
  losses_.add(report.rank, report.round,
              report.nonfinite ? std::numeric_limits<double>::quiet_NaN() : report.loss,
              membership_.rounds().completed() + kMostAhead, report.name);
  driver_.count_growth();
}

LossPage BranchDesk::losses(uint64_t from) const {
  LossPage page = losses_.page(from);
  page.epoch = life_.epoch;
  return page;
}

// --- branches that come back ---------------------------------------------------------------------

void BranchDesk::revive(const BranchChange& change, Reply<BranchReply> reply) {
  const uint32_t branch = change.branch;
  if (!branches_.is_on_disk(branch)) {  // its shelf has it
    return decide(change, 0, std::move(reply));
  }
  if (revived_) {
    fail(ErrorCode::kTaken, "branch {} is being revived: wait until it is",
         revived_->change.branch);
  }
  branches_.shelf_for_one(hyper_.lowest_needed());
  driver_.count_growth();
  const uint64_t bytes = Job::branch_bytes(job_.whole_plan(), job_.spec());
  if (!host_.budget.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "branch {} takes {} bytes beside its shelf while it is revived, for which the server has "
         "no room now: end another job, or raise --memory-limit",
         branch, bytes);
  }
  const auto revived = std::make_shared<Revived>(Revived{.change = change,
                                                         .number = remote_.moves().new_number(),
                                                         .bytes = bytes,
                                                         .reply = std::move(reply)});
  revived->change.is_loaded = true;
  revived_ = revived;
  driver_.count_growth();
  bring_back(revived);
}

Story BranchDesk::bring_back(std::shared_ptr<Revived> revived) {
  const auto read = [&] {
    revived->files = job_.make_branch();
    host_.checkpoints->read_branch(job_, revived->change.branch, revived->files);
  };
  std::optional<Error> failed = co_await beside(driver_, host_.writer, read);
  if (driver_.has_ended()) co_return refuse_revival(driver_.end().code(), "the job has ended");
  if (!failed && !remote_.empty()) {
    const CopyPlace place{.state = revived->number};
    revived->is_shared = true;
    for (uint32_t box = 1; box < revived->files.size(); ++box) {
      remote_.moves().begin(box, BoxMoves::Direction::kSend, place, revived->files[box].image());
    }
    const auto share = [&](Background::End done) {
      remote_.share_state({.number = revived->number, .set = true}, std::move(done));
    };
    failed = co_await outcome_of(share);
    if (driver_.has_ended()) co_return;
    remote_.moves().end(place);
  }
  if (failed) co_return refuse_revival(failed->code(), failed->what());
  if (revived->is_shared) {
    std::vector<Job::Shelf> rest;
    std::move(std::next(revived->files.begin()), revived->files.end(), std::back_inserter(rest));
    revived->files.resize(1);
    revived->bytes = job_.shelf_bytes();
    free_beside(std::move(rest));
  }
  const auto answer = [this, revived,
                       reply = std::exchange(revived->reply, nullptr)](Result<BranchReply> result) {
    if (revived_ == revived) drop_revived();  // it was refused
    reply(std::move(result));
  };
  decide(revived->change, 0, answer);
}

void BranchDesk::refuse(ErrorCode code, const std::string& why) {
  if (revived_ && revived_->reply) refuse_revival(code, why);
}

uint64_t BranchDesk::bytes() const { return losses_.bytes() + (revived_ ? revived_->bytes : 0); }

void BranchDesk::refuse_revival(ErrorCode code, const std::string& why) {
  const Reply<BranchReply> reply = std::exchange(revived_->reply, nullptr);
  const uint32_t branch = revived_->change.branch;
  drop_revived();
  reply({code, fmt::format("branch {} cannot be revived: {}", branch, why)});
}

void BranchDesk::drop_revived() {
  if (revived_->is_shared) remote_.drop_state(revived_->number);
  remote_.moves().end({.state = revived_->number});
  free_beside(std::move(revived_->files));
  revived_ = nullptr;
}

// No core knows of the dock yet.
uint64_t BranchDesk::at_boundary(std::span<const BranchOrder> orders) {
  const uint32_t shelves = job_.spec().branches;
  for (const BranchOrder& order : orders) {
    if (order.kind != BranchOrder::kCopy || order.from <= shelves) continue;
    const std::shared_ptr<Revived> revived = std::exchange(revived_, nullptr);
    drop_shelf(job_.exchange_dock(order.from - shelves, std::move(revived->files.front())));
    return revived->number;
  }
  return 0;
}

void BranchDesk::tick() {
  if (job_.docked_bytes() == 0) return;
  for (uint32_t shelf = 1; shelf <= job_.spec().branches; ++shelf) {
    const uint64_t in_progress = membership_.rounds().completed() + 1;
    if (!job_.has_dock(shelf) || branches_.needs_dock(shelf, in_progress)) continue;
    drop_shelf(job_.exchange_dock(shelf, {}));
    remote_.free_dock(shelf);
  }
}

void BranchDesk::drop_shelf(Job::Shelf shelf) {
  std::vector<Job::Shelf> one;
  one.push_back(std::move(shelf));
  free_beside(std::move(one));
}

void BranchDesk::free_beside(std::vector<Job::Shelf> shelves) {
  std::erase_if(shelves, [](const Job::Shelf& shelf) { return shelf.arrays.empty(); });
  if (shelves.empty()) return;
  host_.builder.run([rest = std::make_shared<std::vector<Job::Shelf>>(
                         std::move(shelves))]() mutable { rest.reset(); });
}

}  // namespace phub
