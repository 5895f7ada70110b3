// The API: a rank's calls to the server, and its end.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "worker/any_error.h"
#include "worker/save/key_states.h"
#include "worker/worker.h"
#include "worker/worker_impl.h"

namespace phub {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions{50};

}  // namespace

uint64_t Worker::set_hyper(const std::map<std::string, double>& values, uint64_t round) {
  return only_errors([&] {
    const HyperRequest request{.round = impl_->exchange.rounds().this_or_next(round),
                               .values = values};
    return impl_->keeper
        .ask_server([&](ControlClient& client) {
          return client.set_hyper(impl_->keeper.credential(), request);
        })
        .round;
  });
}

void Worker::remark(const std::string& subject, const std::string& text) {
  only_errors([&] {
    const RemarkRequest request{.remark = {.subject = subject, .text = text}};
    impl_->keeper.ask_server(
        [&](ControlClient& client) { client.remark(impl_->keeper.credential(), request); });
  });
}

std::vector<std::string> Worker::state_names() const {
  const auto names = optimizer_states(spec());
  return {names.begin(), names.end()};
}

uint64_t Worker::get_state(std::span<KeyState> states) {
  return only_errors([&] {
    impl_->keeper.failure().check();
    impl_->exchange.rounds().check_between();
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
    const uint64_t complete = impl_->exchange.rounds().complete();
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
    i.exchange.rounds().say_never_pushed();
    i.over.request_stop();
    const std::lock_guard one(i.leaving);
    if (i.left) return;
    i.left = !i.keeper.failure().happened();
    i.exchange.flush();  // pushes so far go out before the leave
    if (i.left) i.saver.finish(std::chrono::milliseconds(timeout_ms));
    i.keeper.end(fmt::format("rank {} has left job '{}'", rank(), spec().name));
    i.exchange.release_memory();
    if (!i.left) i.keeper.failure().check();  // throws the failure
    i.keeper.tell_server(timeout_ms);         // last: its answer may take long
  });
}

void Worker::abandon() {
  only_errors([&] {
    impl_->over.request_stop();
    const std::lock_guard one(impl_->leaving);
    impl_->keeper.abandon();
    impl_->exchange.release_memory();
  });
}

WorkerStats Worker::stats() const { return impl_->exchange.stats(); }

std::string Worker::waits_for() const { return impl_->stalls.describe(); }

MemoryDevice* Worker::memory_device() const { return impl_->options.memory_device; }

std::string Worker::connection() const {
  const std::string details = impl_->keeper.link().describe();
  return impl_->keeper.reply().offer.transport + (details.empty() ? "" : ": " + details);
}

}  // namespace phub
