// The API: a rank's decisions about branches, and the losses that they follow from.
#include <algorithm>
#include <utility>

#include "transport/control/branch_runs.h"
#include "worker/any_error.h"
#include "worker/worker.h"
#include "worker/worker_impl.h"

namespace phub {
namespace {

BranchReply change_branches(LinkKeeper& keeper, const KeyRounds& rounds, BranchRequest request) {
  return only_errors([&] {
    const bool lists = request.action == BranchAction::kList;
    if (!lists) request.round = rounds.this_or_next(request.round);
    // The files of a branch may wait behind others', and take as long as they are large.
    const bool reads_files = request.action == BranchAction::kRevive;
    const uint32_t limit_ms = reads_files ? 0 : calls::change_branches.timeout_ms;
    return keeper.ask_server([&](ControlClient& client) {
      return client.change_branches(keeper.credential(), request, limit_ms);
    });
  });
}

}  // namespace

BranchReply Worker::fork(uint32_t parent, const std::map<std::string, double>& values,
                         uint64_t round) {
  return change_branches(
      impl_->keeper, impl_->exchange.rounds(),
      {.action = BranchAction::kFork, .round = round, .branch = parent, .values = values});
}

uint64_t Worker::schedule(std::span<const BranchTurn> turns, uint64_t round) {
  return change_branches(impl_->keeper, impl_->exchange.rounds(),
                         {.action = BranchAction::kSchedule,
                          .round = round,
                          .turns = {turns.begin(), turns.end()}})
      .round;
}

uint64_t Worker::discard(uint32_t branch, uint64_t round) {
  return change_branches(impl_->keeper, impl_->exchange.rounds(),
                         {.action = BranchAction::kDiscard, .round = round, .branch = branch})
      .round;
}

uint64_t Worker::kill(uint32_t branch, uint64_t round) {
  return change_branches(impl_->keeper, impl_->exchange.rounds(),
                         {.action = BranchAction::kKill, .round = round, .branch = branch})
      .round;
}

uint64_t Worker::revive(uint32_t branch, uint64_t round) {
  return change_branches(impl_->keeper, impl_->exchange.rounds(),
                         {.action = BranchAction::kRevive, .round = round, .branch = branch})
      .round;
}

BranchReply Worker::branches() {
  return change_branches(impl_->keeper, impl_->exchange.rounds(), {.action = BranchAction::kList});
}

std::map<std::string, double> Worker::branch_values(uint32_t branch) {
  BranchReply all = branches();
  const auto values_in = [branch](auto& found) -> std::map<std::string, double>* {
    const auto at = std::ranges::find_if(found, [=](const auto& b) { return b.branch == branch; });
    return at == found.end() ? nullptr : &at->values;
  };
  if (auto* const values = values_in(all.branches)) return std::move(*values);
  if (auto* const values = values_in(all.gone)) return std::move(*values);
  fail(ErrorCode::kNotFound, "the job has no branch {}", branch);
}

uint32_t Worker::branch_in(uint64_t round) { return run_in(branches().runs, round).branch; }

uint64_t Worker::batch_in(uint64_t round) { return run_in(branches().batches, round).batch; }

void Worker::report_loss(double loss, uint64_t round, const std::string& name) {
  only_errors([&] {
    const LossRequest report = loss_of(impl_->exchange.rounds().this_or_next(round), loss, name);
    impl_->keeper.ask_server(
        [&](ControlClient& client) { client.report_loss(impl_->keeper.credential(), report); });
  });
}

}  // namespace phub
