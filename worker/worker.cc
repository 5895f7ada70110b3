// The API over its three parts: the link keeper (membership, connection, failure), the session
// (what is sent and received), and the sleeper (how threads share the session and wait for it).
#include "worker/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <utility>

#include "transport/control/branch_runs.h"
#include "transport/memory_device.h"
#include "transport/text.h"
#include "worker/c_abi/any_error.h"
#include "worker/completion_queue.h"
#include "worker/gradient_coder.h"
#include "worker/join.h"
#include "worker/key_states.h"
#include "worker/link_keeper.h"
#include "worker/registered_memory.h"
#include "worker/saver.h"
#include "worker/session.h"
#include "worker/sleeper.h"
#include "worker/stalls.h"
#include "worker/worker_trace.h"

namespace phub {
namespace {

constexpr std::chrono::seconds kFinishSaving{2};
constexpr std::chrono::milliseconds kBetweenQuestions{50};

void check_f32(const JobSpec& spec, const std::string& dtype, const char* what) {
  if (dtype == "f32") return;
  fail(ErrorCode::kInvalid, "{0}s of job '{1}' are {2}: use {0}_bytes()", what, spec.name, dtype);
}

}  // namespace

struct Worker::Impl {
  using Lock = Sleeper::Lock;
  Impl(const WorkerOptions& worker_options, Joined joined)
      : options(worker_options),
        keeper(options, std::move(joined)),
        stalls(keeper),
        sleeper(keeper, stalls),
        order(parse_send_order(options.send_order)),
        coder(keeper.reply(), options.carry_over > 0),
        saver(keeper, coder) {}
  ~Impl() {
    say_left_out();
    sleeper.stop();
    const bool fails = made && std::uncaught_exceptions() > exceptions;
    if (fails) keeper.abandon();
    if (!fails) saver.finish(kFinishSaving);
    keeper.stop();
  }

  // `stop` ends it.
  static std::unique_ptr<Impl> started(const WorkerOptions& options, Joined joined,
                                       const std::string& trace, const std::stop_token& stop = {});
  // For a worker that had this answer, and lost the server.
  static std::unique_ptr<Impl> joined_again(const WorkerOptions& options, JoinReply lost,
                                            const std::stop_token& stop);
  void start(const std::string& trace_file);
  void release_memory();
  // Puts the gradient into the key's slots. Returns whether bytes were copied.
  using CopyIn = std::function<bool(Lock& lock)>;
  Pushed push(size_t key, const PushOptions& how);
  Pushed push(size_t key, const PushOptions& how, const CopyIn& copy_in);
  void wait(size_t key);
  void carry_over(size_t key);
  void check_key(size_t key) const;
  void check_factors(size_t key, std::span<const FactorPairs> factors) const;
  std::vector<uint32_t> in_order(size_t key, const GradientRows& rows) const;
  void copy_out(size_t key);
  void received(size_t key);
  void save_before_push(size_t key);
  // `given`: the caller has initial parameters. Throws Error(kInvalid) if nobody would look at
  // them.
  void check_begins_with(bool given) const;
  bool broadcast(const std::function<const float*(size_t key)>& initial_of);
  void check_between_rounds();  // throws Error(kInvalid)
  uint64_t this_or_next(uint64_t round);
  void say_left_out() noexcept;
  BranchReply change_branches(BranchRequest request);
  uint64_t change_branch(BranchAction action, uint32_t branch, uint64_t round);

  const WorkerOptions options;
  LinkKeeper keeper;
  StallWatch stalls;
  Sleeper sleeper;
  const SendOrder order;
  GradientCoder coder;
  Saver saver;
  std::unordered_map<std::string_view, size_t> key_by_name;

  // Guarded by the sleeper's lock.
  std::unique_ptr<WorkerTrace> trace;  // null: no trace
  std::unique_ptr<Session> session;
  std::optional<CompletionQueue> completions;
  std::optional<RegisteredMemory> memory;
  std::map<size_t, KeyMemory> registered;  // for the worker that comes after this one
  uint64_t pushes = 0;

  std::stop_source over;  // ends rejoin()
  std::mutex rejoining;
  bool replaced = false;  // guarded by rejoining
  std::mutex states;      // a rank gets or sets states once at a time
  std::mutex leaving;
  bool left = false;  // guarded by leaving
  std::atomic<bool> said_left_out = false;
  // An exception that destroys a worker is a failure of the rank: it has not left.
  bool made = false;                                  // the constructor has returned
  const int exceptions = std::uncaught_exceptions();  // when it was made
};

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

Worker::Worker(const WorkerOptions& options)
    : impl_(only_errors([&] {
        Joined joined = join(options);
        const JoinReply first = joined.reply;
        try {
          return Impl::started(options, std::move(joined), options.trace);
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kRewound) throw;
        }
        return Impl::joined_again(options, first, {});
      })) {
  impl_->made = true;
}
Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) { impl_->made = true; }
Worker::~Worker() = default;

std::unique_ptr<Worker> Worker::rejoin() {
  return only_errors([&] {
    Impl& lost = *impl_;
    const std::lock_guard one(lost.rejoining);
    if (lost.replaced || !lost.keeper.is_rewound()) {
      fail(ErrorCode::kInvalid, "rank {} of job '{}' {}", rank(), spec().name,
           lost.replaced ? "has joined again already: use the worker that rejoin() returned"
                         : "has not lost its server: it need not rejoin");
    }
    {
      const Impl::Lock alone = lost.sleeper.lock();
      lost.keeper.give_up_ports();
    }
    auto next = Impl::joined_again(lost.options, lost.keeper.reply(), lost.over.get_token());
    lost.release_memory();
    {
      const Impl::Lock before = lost.sleeper.lock();
      next->registered = lost.registered;
    }
    Impl::Lock lock = next->sleeper.lock();
    for (const auto& [key, memory] : next->registered) next->memory->set(key, memory, lock);
    lock.unlock();
    lost.replaced = true;
    return std::unique_ptr<Worker>(new Worker(std::move(next)));
  });
}

uint32_t Worker::rank() const { return impl_->keeper.reply().rank; }
uint32_t Worker::incarnation() const { return impl_->keeper.reply().incarnation; }
uint32_t Worker::world_size() const { return spec().world_size; }
uint64_t Worker::first_round() const { return impl_->keeper.reply().first_round; }
bool Worker::initial_counts() const { return impl_->keeper.reply().send_initial; }
std::optional<std::span<const std::byte>> Worker::restored(std::string_view name) const {
  return impl_->saver.restored(name);
}
bool Worker::saves() const { return impl_->options.saver && impl_->saver.is_active(); }
void Worker::save_by_call(bool by_call) { impl_->saver.set_by_call(by_call); }
uint64_t Worker::next_saved() const { return saves() ? impl_->saver.due() : 0; }
void Worker::save(RankState more) {
  only_errors([&] { impl_->saver.save(std::move(more)); });
}
const std::string& Worker::server() const { return impl_->keeper.server(); }
const std::string& Worker::job_token() const { return impl_->keeper.reply().job_token; }
const JobSpec& Worker::spec() const { return impl_->keeper.spec(); }
size_t Worker::keys() const { return spec().keys.size(); }

size_t Worker::key(std::string_view name) const {
  const auto at = impl_->key_by_name.find(name);
  if (at != impl_->key_by_name.end()) return at->second;
  fail(ErrorCode::kNotFound, "job '{}' has no key '{}'", spec().name, name);
}

std::span<std::byte> Worker::gradient_bytes(size_t key) {
  impl_->check_key(key);
  if (is_compact(spec().keys[key])) {
    fail(ErrorCode::kInvalid, "key '{}' has no memory for its gradient: its {} are sent",
         spec().keys[key].name, spec().keys[key].format);
  }
  if (impl_->coder.codes(key)) return std::as_writable_bytes(impl_->coder.gradient(key));
  return impl_->session->gradient(key);
}

std::span<float> Worker::gradient(size_t key) {
  std::span<std::byte> bytes = gradient_bytes(key);
  check_f32(spec(), gradient_memory_format(spec(), spec().keys[key]), "gradient");
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<const std::byte> Worker::parameter_bytes(size_t key) const {
  impl_->check_key(key);
  return impl_->session->result(key);
}

std::span<const float> Worker::parameters(size_t key) const {
  check_f32(spec(), parameter_memory_format(spec()), "parameter");
  std::span<const std::byte> bytes = parameter_bytes(key);
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void Worker::register_memory(size_t key, const KeyMemory& memory) {
  impl_->check_key(key);
  if (memory_device() != nullptr && (memory.gradient != nullptr || memory.parameters != nullptr)) {
    fail(ErrorCode::kInvalid,
         "key '{}': a worker whose gradients and parameters lie in memory of {} (memory_device) "
         "registers no other memory",
         spec().keys[key].name, memory_device()->name());
  }
  only_errors([&] {
    Impl::Lock lock = impl_->sleeper.lock();
    try {
      while (impl_->memory->is_lent(key)) impl_->sleeper.wait(lock, key);
    } catch (...) {
      if (!impl_->keeper.failed()) throw;
    }
    impl_->memory->set(key, memory, lock);
    impl_->registered[key] = memory;
  });
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

bool Worker::broadcast(std::span<const float> initial) {
  return only_errors([&] {
    impl_->check_begins_with(!initial.empty());
    std::vector<uint64_t> first;  // element of each key
    uint64_t elements = 0;
    for (const KeySpec& key : spec().keys) {
      first.push_back(elements);
      elements += key.elements;
    }
    return impl_->broadcast([&](size_t key) {
      if (initial.size() == elements) return initial.data() + first[key];
      fail(ErrorCode::kInvalid, "broadcast: {} initial parameters for keys of {} elements in all",
           initial.size(), elements);
    });
  });
}

bool Worker::broadcast_keys(std::span<const float* const> initial) {
  return only_errors([&] {
    impl_->check_begins_with(!initial.empty());
    return impl_->broadcast([&](size_t key) {
      if (initial.size() != keys()) {
        fail(ErrorCode::kInvalid, "broadcast: initial parameters of {} keys, the job has {}",
             initial.size(), keys());
      }
      if (initial[key] == nullptr) {
        fail(ErrorCode::kInvalid, "broadcast: the initial parameters of key '{}' are null",
             spec().keys[key].name);
      }
      return initial[key];
    });
  });
}

Pushed Worker::push(size_t key, const PushOptions& how) {
  return only_errors([&] { return impl_->push(key, how); });
}

Pushed Worker::push_factors(size_t key, std::span<const FactorPairs> factors,
                            const PushOptions& how) {
  return only_errors([&] {
    impl_->check_factors(key, factors);
    PushOptions as = how;
    as.null |= std::ranges::all_of(factors, [](const FactorPairs& f) { return f.pairs == 0; });
    return impl_->push(key, as, [&](Impl::Lock& lock) {
      return impl_->memory->copy_factors_in(key, factors, lock);
    });
  });
}

Pushed Worker::push_rows(size_t key, const GradientRows& rows, const PushOptions& how) {
  return only_errors([&] {
    const std::vector<uint32_t> order = impl_->in_order(key, rows);
    PushOptions as = how;
    as.null |= order.empty();
    return impl_->push(key, as, [&](Impl::Lock& lock) {
      return impl_->memory->copy_rows_in(key, rows, order, lock);
    });
  });
}

void Worker::wait(size_t key) {
  impl_->check_key(key);
  only_errors([&] {
    impl_->saver.check_not_within();
    {
      const Impl::Lock lock = impl_->sleeper.lock();
      const auto error = impl_->stalls.passed_over_itself(*impl_->session, key);
      if (error) throw Error(error->code(), error->what());
    }
    impl_->wait(key);
    impl_->received(key);
  });
}

void Worker::wait_all() {
  only_errors([&] {
    impl_->saver.check_not_within();
    impl_->wait(Session::kAllKeys);
    for (size_t key = 0; key < keys(); ++key) impl_->received(key);
  });
}

bool Worker::test(size_t key) {
  impl_->check_key(key);
  impl_->saver.check_not_within();
  impl_->keeper.check();
  return only_errors([&] {
    {
      const Impl::Lock lock = impl_->sleeper.lock();
      impl_->sleeper.poll();
      if (!impl_->session->ready(key)) return false;
    }
    impl_->copy_out(key);
    impl_->received(key);
    return true;
  });
}

size_t Worker::poll() {
  impl_->keeper.check();
  return only_errors([&] {
    const Impl::Lock lock = impl_->sleeper.lock();
    impl_->sleeper.poll();
    return impl_->session->outstanding();
  });
}

std::optional<Completion> Worker::wait_any() {
  return only_errors([&]() -> std::optional<Completion> {
    impl_->saver.check_not_within();
    const auto ended = impl_->sleeper.wait_any();
    if (!ended) return std::nullopt;
    Completion completion{.pushed = ended->pushed, .tag = ended->tag};
    try {
      if (ended->end == CompletionQueue::End::kFailed) impl_->keeper.check();
      if (ended->end == CompletionQueue::End::kLate) {
        completion.error = impl_->stalls.timeout_of(ended->pushed.key);
      } else {
        impl_->copy_out(ended->pushed.key);
      }
    } catch (...) {
      completion.error.emplace(error_in_flight());
    }
    if (completion.error) return completion;
    try {
      impl_->saver.received(ended->pushed.key, ended->pushed.round);
    } catch (...) {
      completion.saver_error.emplace(error_in_flight());
    }
    return completion;
  });
}

void Worker::wake() { impl_->sleeper.wake(); }

void Worker::forget_announced() {
  const Impl::Lock lock = impl_->sleeper.lock();
  impl_->completions->forget();
}

void Worker::end(const std::string& why) {
  only_errors([&] {
    impl_->over.request_stop();
    impl_->keeper.end(why);
  });
}

void Worker::pull(size_t key, std::span<std::byte> into) {
  wait(key);
  Impl::Lock lock = impl_->sleeper.lock();
  const std::span<const std::byte> from = impl_->memory->result(key);
  lock.unlock();
  if (into.size() != from.size()) {
    fail(ErrorCode::kInvalid, "pull: key '{}' has {} bytes, the destination {}",
         spec().keys[key].name, from.size(), into.size());
  }
  if (memory_device() != nullptr) {
    memory_device()->read(into.data(), from.data(), from.size());
  } else {
    std::memcpy(into.data(), from.data(), from.size());
  }
  impl_->memory->bytes_copied += from.size();
}

uint64_t Worker::round(size_t key) const {
  impl_->check_key(key);
  const Impl::Lock lock = impl_->sleeper.lock();
  return impl_->session->round(key);
}

std::optional<RoundVerdict> Worker::verdict() const {
  const Impl::Lock lock = impl_->sleeper.lock();
  return impl_->session->verdict();
}

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
