#include "worker/worker_impl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>

#include "transport/memory_device.h"
#include "transport/text.h"

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
  keeper.connect([this] { sleeper.wake_all(); });
  saver.restore();
  const JoinReply& reply = keeper.reply();
  session = std::make_unique<Session>(reply, keeper.link(), order);
  if (!trace_file.empty()) {
    trace = std::make_unique<WorkerTrace>(trace_file, reply, options.trace_events);
    session->trace(trace->log());
  }
  for (size_t k = 0; k < reply.spec.keys.size(); ++k) key_by_name[reply.spec.keys[k].name] = k;
  memory.emplace(reply.spec, *session, keeper.link(), coder);
  completions.emplace(reply.spec.keys.size());
  sleeper.start(*session, *completions, *memory, trace.get());
}

// The caller may free its memory afterwards. REQUIRES: the worker has failed or ended.
void Worker::Impl::release_memory() {
  Lock lock = sleeper.lock();
  memory->await_copies(Session::kAllKeys, lock);
  memory->take_all_back();
}

void Worker::Impl::check_key(size_t key) const {
  const JobSpec& spec = keeper.spec();
  if (key >= spec.keys.size()) {
    fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key, spec.name,
         spec.keys.size());
  }
}

void Worker::Impl::check_factors(size_t key, std::span<const FactorPairs> factors) const {
  check_key(key);
  const KeySpec& of = keeper.spec().keys[key];
  if (!is_factors(of)) {
    fail(
        ErrorCode::kInvalid,
        "push_factors: the gradient of key '{}' is sent as it is; to send its factors the job must "
        "give it a rank_limit",
        of.name);
  }
  uint64_t pairs = 0;
  for (const FactorPairs& part : factors) {
    if (part.pairs > 0 && (part.left == nullptr || part.right == nullptr)) {
      fail(ErrorCode::kInvalid, "push_factors: {} pairs of key '{}' are null", part.pairs, of.name);
    }
    pairs += part.pairs;
  }
  if (pairs <= of.rank_limit) return;
  fail(ErrorCode::kInvalid, "push_factors: {} pairs for key '{}', whose rank_limit is {}", pairs,
       of.name, of.rank_limit);
}

// The rows by ascending index, of equal ones in their order; checked.
std::vector<uint32_t> Worker::Impl::in_order(size_t key, const GradientRows& rows) const {
  check_key(key);
  const KeySpec& of = keeper.spec().keys[key];
  if (!is_rows(of)) {
    fail(ErrorCode::kInvalid,
         "push_rows: of the gradient of key '{}' all rows are sent; to send those that are not "
         "zero the job must give it a rows_limit",
         of.name);
  }
  const std::span<const int64_t> indices = rows.indices;
  const uint64_t columns = of.shape[1];
  if (indices.size() > std::numeric_limits<uint32_t>::max() ||
      rows.elements.size() != indices.size() * columns) {
    fail(ErrorCode::kInvalid, "push_rows: {} rows of {} columns for key '{}' have {} elements",
         indices.size(), columns, of.name, rows.elements.size());
  }
  for (const int64_t index : indices) {
    if (index >= 0 && static_cast<uint64_t>(index) < of.shape[0]) continue;
    fail(ErrorCode::kInvalid, "push_rows: there is no row {} of key '{}', which has rows 0 to {}",
         index, of.name, of.shape[0] - 1);
  }
  std::vector<uint32_t> order(indices.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&indices](uint32_t i) { return indices[i]; });
  size_t different = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    different += i == 0 || indices[order[i]] != indices[order[i - 1]] ? 1 : 0;
  }
  if (different > of.rows_limit) {
    fail(ErrorCode::kInvalid,
         "push_rows: {} different rows for key '{}', whose rows_limit is {}: give the job a "
         "rows_limit of as many as a rank has in a round at most",
         different, of.name, of.rows_limit);
  }
  return order;
}

Pushed Worker::Impl::push(size_t key, const PushOptions& how) {
  check_key(key);
  const KeySpec& of = keeper.spec().keys[key];
  if (is_compact(of) && !how.null) {
    fail(ErrorCode::kInvalid, "the {} of key '{}' are sent: use push_{}()", of.format, of.name,
         of.format);
  }
  return push(key, how, [&](Lock& lock) { return memory->copy_in(key, lock); });
}

Pushed Worker::Impl::push(size_t key, const PushOptions& how, const CopyIn& copy_in) {
  check_key(key);
  if (!session->takes_part(key)) {
    fail(ErrorCode::kInvalid,
         "key '{}' was pushed, and this rank joined with the interest to neither write nor read it",
         keeper.spec().keys[key].name);
  }
  keeper.check();
  saver.check_not_within();
  wait(key);  // for the previous round
  if (saver.is_active()) save_before_push(key);
  const uint64_t begin_ns = trace ? trace_now_ns() : 0;
  Lock lock = sleeper.lock();
  const bool copied_in = !how.null && copy_in(lock);
  std::vector<float> magnitudes;
  if (!how.null && order == SendOrder::kMagnitude) magnitudes = memory->magnitudes(key, lock);
  keeper.check();
  if (!session->ready(key) || session->sending_initial()) {
    fail(ErrorCode::kInvalid, "key '{}' was pushed while another thread {}",
         keeper.spec().keys[key].name,
         session->ready(key) ? "sends the initial parameters" : "pushed it too");
  }
  const Pushed pushed{.key = key, .round = session->round(key) + 1};
  if (trace && copied_in) trace->add("copy in", key, pushed.round, begin_ns);
  memory->lend(key);
  session->push(key, how.priority, how.null, magnitudes);
  if (how.announced) completions->expect(pushed, how.tag, sleeper.deadline());
  ++pushes;
  sleeper.pushed(how.announced);
  return pushed;
}

// `key` may be Session::kAllKeys. Results that must be copied out are, by the calling thread.
void Worker::Impl::wait(size_t key) {
  Lock lock = sleeper.lock();
  if (coder.carries()) carry_over(key);
  sleeper.wait(lock, key);
  lock.unlock();
  if (key != Session::kAllKeys) return copy_out(key);
  for (size_t k = 0; k < keeper.spec().keys.size(); ++k) copy_out(k);
}

// What there is no budget for is not waited for. REQUIRES: the lock is held.
void Worker::Impl::carry_over(size_t key) {
  const JobSpec& spec = keeper.spec();
  const bool ssp = spec.consistency == "ssp";
  const uint32_t most = ssp ? std::min(options.carry_over, spec.slack) : options.carry_over;
  session->carry_over(key, most, [this](size_t of, const ChunkLayout& chunk, size_t offset) {
    return coder.carry(of, chunk, session->gradient(of).data() + offset);
  });
}

// The caller has the key's latest result.
void Worker::Impl::received(size_t key) {
  if (!saver.is_active()) return;
  Lock lock = sleeper.lock();
  const uint64_t round = session->round(key);
  lock.unlock();
  saver.received(key, round);
}

// If a round that is saved lies before this push, it must be over for all keys.
void Worker::Impl::save_before_push(size_t key) {
  received(key);
  Lock lock = sleeper.lock();
  const uint64_t next = session->round(key) + 1;
  if (!saver.is_due_before(next)) return;
  if (saver.is_by_call()) {
    fail(ErrorCode::kInvalid,
         "key '{}' is pushed in round {}, before save() of the state after round {}",
         keeper.spec().keys[key].name, next, saver.due());
  }
  lock.unlock();
  wait(Session::kAllKeys);
  for (size_t k = 0; k < keeper.spec().keys.size(); ++k) received(k);
  if (!saver.is_due_before(next)) return;
  lock.lock();
  for (size_t k = 0; k < keeper.spec().keys.size(); ++k) {
    if (!session->takes_part(k) || session->round(k) >= saver.due()) continue;
    fail(ErrorCode::kInvalid,
         "key '{}' is pushed in round {}, and key '{}' was not in round {}, after which this "
         "rank's state is saved: push every key first",
         keeper.spec().keys[key].name, next, keeper.spec().keys[k].name, saver.due());
  }
}

void Worker::Impl::copy_out(size_t key) {
  if (options.memory_device != nullptr) return options.memory_device->flush_nic_writes();
  Lock lock = sleeper.lock();
  if (!memory->must_copy_out(key)) return;
  const TraceSpan span(trace ? &trace->log() : nullptr,
                       trace ? trace->event("copy out", key, session->round(key)) : TraceEvent());
  memory->copy_out(key, lock);
}

// Sends the initial parameters, if the job needs this rank's, and waits for all keys. Returns
// whether it sent them. `initial_of` throws if the caller's are not as they should be.
bool Worker::Impl::broadcast(const std::function<const float*(size_t key)>& initial_of) {
  keeper.check();
  Lock lock = sleeper.lock();
  const bool sends = session->needs_initial();
  if (sends) session->send_initial(initial_of);
  lock.unlock();
  try {
    wait(Session::kAllKeys);
  } catch (...) {
    if (!sends) throw;
    lock.lock();
    session->forget_initial();  // the caller may free its memory now
    lock.unlock();
    keeper.fail_with_exception();
    throw;
  }
  return sends;
}

void Worker::Impl::check_begins_with(bool given) const {
  const JobSpec& spec = keeper.spec();
  if (!given || spec.initial == "broadcast") return;
  fail(ErrorCode::kInvalid,
       "broadcast: job '{}' begins with zeros, and these parameters would not count: say "
       "'broadcast' "
       "in the option initial, on all ranks, or give none",
       spec.name);
}

// A key that no rank pushes holds nobody up, and stays as it began: says so, once, at the end.
void Worker::Impl::say_left_out() noexcept try {
  const bool in_rounds = keeper.spec().consistency == "bsp" && !folds(keeper.spec());
  if (!session || !in_rounds || said_left_out.exchange(true)) return;
  const std::vector<KeySpec>& keys = keeper.spec().keys;
  const uint64_t before = keeper.reply().first_round - 1;
  uint64_t rounds = 0;
  std::vector<size_t> never;
  const Lock lock = sleeper.lock();
  for (size_t k = 0; k < keys.size(); ++k) {
    if (!session->takes_part(k)) continue;
    rounds = std::max(rounds, session->round(k) - before);
    if (session->ready(k) && session->round(k) == before) never.push_back(k);
  }
  if (never.empty() || rounds < 2) return;
  const std::string text = fmt::format(
      "phub: rank {} of job '{}' took part in {} rounds, and never pushed key '{}'{}: nothing has "
      "changed there\n",
      keeper.reply().rank, keeper.spec().name, rounds, printable(keys[never.front()].name),
      never.size() > 1 ? fmt::format(" and {} others", never.size() - 1) : "");
  std::fputs(text.c_str(), stderr);
} catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a line to people
}

}  // namespace phub
