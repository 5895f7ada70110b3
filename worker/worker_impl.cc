#include "worker/worker_impl.h"

#include <fmt/format.h>

namespace phub {

std::unique_ptr<Worker::Impl> Worker::Impl::started(const WorkerOptions& options, Joined joined,
                                                    const std::string& trace,
                                                    const std::stop_token& stop) {
  auto impl = std::make_unique<Impl>(options, std::move(joined));
  impl->start(trace);
  const std::stop_callback ends(stop, [&impl] { impl->keeper.end("this worker has ended"); });
  if (options.await_ranks) impl->keeper.await_ranks();
  return impl;
}

// The server may die again meanwhile: then once more.
std::unique_ptr<Worker::Impl> Worker::Impl::joined_again(const WorkerOptions& options,
                                                         JoinReply lost,
                                                         const std::stop_token& stop) {
  const SteadyTime give_up = now() + std::chrono::milliseconds(options.rejoin_limit_ms);
  for (;;) {
    Joined joined = phub::rejoin(options, lost, give_up, stop);
    lost.epoch = joined.reply.epoch;
    lost.incarnation = joined.reply.incarnation;
    std::string file =
        options.trace;  // another one, as the worker before writes its own at its end
    if (!file.empty()) file += fmt::format(".{}-{}", lost.epoch, joined.reply.incarnation);
    try {
      return started(options, std::move(joined), file, stop);
    } catch (const Error& error) {
      if (!may_rejoin_after(error) || stop.stop_requested() || now() > give_up) throw;
    }
  }
}

void Worker::Impl::start(const std::string& trace_file) {
  exchange.connect();
  saver.restore();
  const std::vector<KeySpec>& keys = keeper.spec().keys;
  for (size_t k = 0; k < keys.size(); ++k) key_by_name[keys[k].name] = k;
  exchange.start(trace_file);
}

const KeySpec& Worker::Impl::key(size_t key) const {
  const JobSpec& spec = keeper.spec();
  if (key < spec.keys.size()) return spec.keys[key];
  fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key, spec.name,
       spec.keys.size());
}

Pushed Worker::Impl::push(size_t key, const PushOptions& how, const KeyExchange::CopyIn& copy_in) {
  begin_push(key);
  return exchange.push(key, how, copy_in);
}

Pushed Worker::Impl::push_part(size_t key, size_t part, const PushOptions& how) {
  if (part == 0) begin_push(key);
  return exchange.push_part(key, part, how);
}

void Worker::Impl::begin_push(size_t key) {
  saver.check_not_within();
  exchange.await_turn(key);
  if (saver.is_active()) save_before_push(key);
}

void Worker::Impl::received(size_t key) {
  if (saver.is_active()) saver.received(key, exchange.rounds().of(key));
}

// If a round that is saved lies before this push, it must be over for all keys.
void Worker::Impl::save_before_push(size_t key) {
  received(key);
  const uint64_t next = exchange.rounds().of(key) + 1;
  if (!saver.is_due_before(next)) return;
  const std::vector<KeySpec>& keys = keeper.spec().keys;
  if (saver.is_by_call()) {
    fail(ErrorCode::kInvalid,
         "key '{}' is pushed in round {}, before save() of the state after round {}",
         keys[key].name, next, saver.due());
  }
  exchange.wait(Session::kAllKeys);
  for (size_t k = 0; k < keys.size(); ++k) received(k);
  if (!saver.is_due_before(next)) return;
  if (const auto behind = exchange.rounds().key_before(saver.due())) {
    fail(ErrorCode::kInvalid,
         "key '{}' is pushed in round {}, and key '{}' was not in round {}, after which this "
         "rank's state is saved: push every key first",
         keys[key].name, next, keys[*behind].name, saver.due());
  }
}

}  // namespace phub
