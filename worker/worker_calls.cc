// The API: a rank's calls to the server, and its end.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "transport/control/branch_runs.h"
#include "worker/any_error.h"
#include "worker/save/key_states.h"
#include "worker/worker.h"
#include "worker/worker_impl.h"

namespace phub {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions{50};

}  // namespace

// 0: the first round in which this rank has pushed no key.
uint64_t Worker::Impl::this_or_next(uint64_t round) {
  if (round > 0) return round;
  const Lock lock = sleeper.lock();
  return session->next_round();
}

BranchReply Worker::Impl::change_branches(BranchRequest request) {
  if (request.action != BranchAction::kList) request.round = this_or_next(request.round);
  // The files of a branch may wait behind others', and take as long as they are large.
  const bool reads_files = request.action == BranchAction::kRevive;
  const uint32_t limit_ms = reads_files ? 0 : calls::change_branches.timeout_ms;
  return keeper.ask_server([&](ControlClient& client) {
    return client.change_branches(keeper.credential(), request, limit_ms);
  });
}

uint64_t Worker::Impl::change_branch(BranchAction action, uint32_t branch, uint64_t round) {
  return only_errors(
      [&] { return change_branches({.action = action, .round = round, .branch = branch}).round; });
}

uint64_t Worker::set_hyper(const std::map<std::string, double>& values, uint64_t round) {
  return only_errors([&] {
    const HyperRequest request{.round = impl_->this_or_next(round), .values = values};
    return impl_->keeper
        .ask_server([&](ControlClient& client) {
          return client.set_hyper(impl_->keeper.credential(), request);
        })
        .round;
  });
}

BranchReply Worker::fork(uint32_t parent, const std::map<std::string, double>& values,
                         uint64_t round) {
  return only_errors([&] {
    return impl_->change_branches(
        {.action = BranchAction::kFork, .round = round, .branch = parent, .values = values});
  });
}

uint64_t Worker::schedule(std::span<const BranchTurn> turns, uint64_t round) {
  return only_errors([&] {
    return impl_
        ->change_branches({.action = BranchAction::kSchedule,
                           .round = round,
                           .turns = {turns.begin(), turns.end()}})
        .round;
  });
}

uint64_t Worker::discard(uint32_t branch, uint64_t round) {
  return impl_->change_branch(BranchAction::kDiscard, branch, round);
}

uint64_t Worker::kill(uint32_t branch, uint64_t round) {
  return impl_->change_branch(BranchAction::kKill, branch, round);
}

uint64_t Worker::revive(uint32_t branch, uint64_t round) {
  return impl_->change_branch(BranchAction::kRevive, branch, round);
}

BranchReply Worker::branches() {
  return only_errors([&] { return impl_->change_branches({.action = BranchAction::kList}); });
}

uint32_t Worker::branch_in(uint64_t round) { return run_in(branches().runs, round).branch; }

uint64_t Worker::batch_in(uint64_t round) { return run_in(branches().batches, round).batch; }

void Worker::report_loss(double loss, uint64_t round) {
  only_errors([&] {
    const LossRequest report = loss_of(impl_->this_or_next(round), loss);
    impl_->keeper.ask_server(
        [&](ControlClient& client) { client.report_loss(impl_->keeper.credential(), report); });
  });
}

std::vector<std::string> Worker::state_names() const {
  const auto names = optimizer_states(spec());
  return {names.begin(), names.end()};
}

// Others go on to complete the round, for which this rank's keys may be missing: it would wait for
// itself.
void Worker::Impl::check_between_rounds() {
  const JobSpec& spec = keeper.spec();
  const Lock lock = sleeper.lock();
  std::optional<size_t> first;
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    if (!session->takes_part(k)) continue;
    if (!first) first = k;
    const uint64_t round = session->pushed_round(k), of_first = session->pushed_round(*first);
    if (round == of_first) continue;
    fail(ErrorCode::kInvalid,
         "get_state: key '{}' is pushed up to round {}, and key '{}' up to round {}: a state is of "
         "the time between rounds, when this rank has pushed every key as often",
         spec.keys[*first].name, of_first, spec.keys[k].name, round);
  }
}

uint64_t Worker::get_state(std::span<KeyState> states) {
  return only_errors([&] {
    impl_->keeper.check();
    impl_->check_between_rounds();
    const std::lock_guard lock(impl_->states);
    return phub::get_state(impl_->keeper, states);
  });
}

uint64_t Worker::set_state(std::span<const KeyState> states) {
  return only_errors([&] {
    const std::lock_guard lock(impl_->states);
    return phub::set_state(impl_->keeper, states);
  });
}

uint64_t Worker::checkpoint() {
  return only_errors([&] {
    uint64_t complete = ~uint64_t{0};
    {
      const Impl::Lock lock = impl_->sleeper.lock();
      for (size_t k = 0; k < keys(); ++k) {
        if (!impl_->session->takes_part(k)) continue;
        complete = std::min(complete, impl_->session->round(k));
      }
    }
    for (;;) {
      const CheckpointReply reply = impl_->keeper.ask_server(
          [&](ControlClient& client) { return client.checkpoint(impl_->keeper.credential(), {}); });
      if (reply.round >= complete) return reply.round;
      // It is of before, and nearly over.
      std::this_thread::sleep_for(impl_->keeper.between_questions(kBetweenQuestions));
    }
  });
}

void Worker::await_checkpoint(uint64_t round, uint32_t timeout_ms) {
  only_errors([&] {
    const SteadyTime give_up = now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
      const CheckpointReply reply = impl_->keeper.ask_server([&](ControlClient& client) {
        return client.checkpoint(impl_->keeper.credential(),
                                 {.round = std::max<uint64_t>(round, 1)});
      });
      if (reply.durable) return;
      if (timeout_ms > 0 && now() > give_up) {
        fail(ErrorCode::kTimeout, "no checkpoint of round {} or a later one after {} ms", round,
             timeout_ms);
      }
      std::this_thread::sleep_for(impl_->keeper.between_questions(kBetweenQuestions));
    }
  });
}

std::vector<uint32_t> Worker::missing_ranks() {
  return only_errors([&] {
    return impl_->keeper.ask_server([&](ControlClient& client) {
      return client.heartbeat(impl_->keeper.credential(), kAskMs).missing;
    });
  });
}

void Worker::barrier() {
  only_errors([&] {
    impl_->keeper.ask_server([&](ControlClient& client) {
      client.barrier(impl_->keeper.credential(), impl_->options.wait_timeout_ms);
    });
  });
}

void Worker::leave(uint32_t timeout_ms) {
  only_errors([&] {
    Impl& i = *impl_;
    i.say_left_out();
    i.over.request_stop();
    const std::lock_guard one(i.leaving);
    if (i.left) return;
    i.left = !i.keeper.failed();
    {
      const Impl::Lock lock = i.sleeper.lock();
      i.session->flush();  // pushes so far go out before the leave
    }
    if (i.left) i.saver.finish(std::chrono::milliseconds(timeout_ms));
    i.keeper.end(fmt::format("rank {} has left job '{}'", rank(), spec().name));
    i.release_memory();
    if (!i.left) i.keeper.check();     // throws the failure
    i.keeper.tell_server(timeout_ms);  // last: its answer may take long
  });
}

void Worker::abandon() {
  only_errors([&] {
    impl_->over.request_stop();
    const std::lock_guard one(impl_->leaving);
    impl_->keeper.abandon();
    impl_->release_memory();
  });
}

WorkerStats Worker::stats() const {
  const Impl::Lock lock = impl_->sleeper.lock();
  return {.pushes = impl_->pushes,
          .chunks_pushed = impl_->session->chunks_pushed(),
          .chunks_received = impl_->session->chunks_received(),
          .bytes_copied = impl_->memory->bytes_copied,
          .sleeps = impl_->sleeper.sleeps(),
          .reconnections = impl_->sleeper.reconnections(),
          .chunks_carried_over = impl_->session->chunks_carried_over()};
}

std::string Worker::waits_for() const { return impl_->stalls.describe(); }

MemoryDevice* Worker::memory_device() const { return impl_->options.memory_device; }

std::string Worker::connection() const {
  const std::string details = impl_->keeper.link().describe();
  return impl_->keeper.reply().offer.transport + (details.empty() ? "" : ": " + details);
}

}  // namespace phub
