// The blocking, thread-safe wrapper around Session: a lock, a heartbeat thread, and who sleeps how.
//
// One lock guards the session. Of the threads that wait, one polls and sleeps on the endpoint, the
// others on a condition variable. Failures are noticed by whoever meets them first and kept: from
// then on every call throws the same Error.
#include "worker/worker.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "numa/relax.h"
#include "transport/control_client.h"
#include "transport/shm_memory.h"
#include "transport/ticket.h"
#include "worker/any_error.h"
#include "worker/completion_queue.h"
#include "worker/connect.h"
#include "worker/control_calls.h"
#include "worker/session.h"
#include "worker/spin.h"
#include "worker/stalls.h"
#include "worker/worker_trace.h"

namespace phub {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;
constexpr int kLookUpMs = 50;  // how often a sleeper looks whether the connection is still there
constexpr uint32_t kAskMs = 1000;  // who is missing
// A wait that lasts for a tenth of the progress limit, but no longer than this, asks who holds it
// up.
constexpr uint32_t kLeastStallMs = 100, kMostStallMs = 5000;
constexpr uint32_t kGoodbyeMs = 2000;
constexpr uint32_t kLeastHeartbeatMs = 100;
constexpr milliseconds kBetweenAttempts{20};  // to reconnect
constexpr std::chrono::microseconds kHelpAfter{
    500};  // nobody waits: then the progress thread polls

SteadyTime now() { return std::chrono::steady_clock::now(); }

// A limit of its own, not 0, which is none.
uint32_t sum_ms(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(uint64_t{a} + b, 1, ~uint32_t{0}));
}

// A server that is being started beside its workers is waited for. Whatever becomes of a
// connection, all that is sent is one join.
JoinReply join(ControlClient& control, const WorkerOptions& options) {
  validate(options.spec);
  if (options.silence_limit_ms == 0) {
    fail(ErrorCode::kInvalid, "silence_limit_ms is 0: a server that hangs would never be noticed");
  }
  const std::string id = make_ticket();
  const SteadyTime give_up = now() + milliseconds(options.connect_timeout_ms);
  for (;;) {
    try {
      JoinReply reply =
          control.join({.spec = options.spec,
                        .rank = options.rank,
                        .replace = options.replace,
                        .transport = choose_transport(options.transport, options.server,
                                                      options.connect_timeout_ms),
                        .id = id},
                       sum_ms(options.connect_timeout_ms, options.spec.join_limit_ms));
      // The caller's memory is as large as the caller asked for, whatever the answer says.
      if (const std::string other = difference(options.spec, reply.spec); !other.empty()) {
        fail(ErrorCode::kInternal, "the server's answer is about another job: {}", other);
      }
      return reply;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnavailable || now() > give_up) throw;
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
}

// What a network that breaks, or a server that still clears the broken connection away, answers.
bool may_pass(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout ||
         error.code() == ErrorCode::kTaken || error.code() == ErrorCode::kUnauthorized;
}

// What says nothing about this worker: the server did not answer, or nothing was left to ask it
// with.
bool is_silence(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout ||
         error.code() == ErrorCode::kFull;
}

// Connections may break while they are made: the server then offers others, if the transport can.
std::unique_ptr<WorkerLink> connect(ControlClient& control, const JoinReply& reply,
                                    const Credential& credential, uint32_t timeout_ms) {
  const SteadyTime give_up = now() + milliseconds(timeout_ms);
  Offer offer = reply.offer;
  for (std::optional<Error> first;;) {
    try {
      if (first) offer = control.reconnect(credential, timeout_ms);
      return connect(offer, link_layout_of(reply), timeout_ms);
    } catch (const Error& error) {
      if (!first) first = error;
      if (!may_pass(error) || now() > give_up) throw Error(*first);
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

// Lets go of a lock until the end of a scope, however that ends.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

struct Worker::Impl {
  struct CallerMemory;
  explicit Impl(const WorkerOptions& worker_options);
  ~Impl();

  bool ready(size_t key) const {
    return key >= Session::kAnyKey ? session->all_ready() : session->ready(key);
  }
  void wait(size_t key) {
    wait_until(key, [&] { return ready(key); });
  }
  // `key` is what to be woken for; `done` is called with the lock held.
  template <typename Done>
  void wait_until(size_t key, Done done);
  bool move();
  std::optional<Completion> next();
  Completion completion_of(const CompletionQueue::Ended& ended);
  void sleep(std::unique_lock<std::mutex>& lock, size_t key);
  void copy_out(size_t key);
  bool copy_in(size_t key, std::unique_lock<std::mutex>& lock);
  void copy(CallerMemory& memory, void* to, std::span<const std::byte> from,
            std::unique_lock<std::mutex>& lock);
  void await_copies(size_t key, std::unique_lock<std::mutex>& lock);
  Pushed push(size_t key, const PushOptions& how);
  void check_key(size_t key) const;
  void check_failure();
  void look_up();
  void reconnect(std::unique_lock<std::mutex>& lock);
  void make_connection_again();
  void progress_loop(const std::stop_token& stop);
  void help(const std::stop_token& stop, std::unique_lock<std::mutex>& lock);
  void mend(const std::stop_token& stop, std::unique_lock<std::mutex>& lock);
  void interrupt();
  template <typename Body>
  std::jthread thread(const char* name, Body body);
  // A call to the control port that ends with the worker, and with its failure.
  template <typename Body>
  auto ask(Body body);
  void leave(uint32_t timeout_ms);
  bool has_work() const { return waiters == 0 && !session->all_ready() && !failed; }
  void record_failure(ErrorCode code, const std::string& message);
  void record_failure_in_flight() noexcept;
  void heartbeat_loop(const std::stop_token& stop);
  void await_ranks();
  Error timeout_of(size_t key);
  std::string describe_missing();
  void look_for_stalls();
  void warn_of_stalls(std::unique_lock<std::mutex>& lock);
  std::optional<Error> own_stall(size_t key) const;
  void check_passed_over(size_t key);
  std::string waits_for();
  // When a wait that begins now has taken too long.
  SteadyTime deadline() const {
    return options.wait_timeout_ms > 0 ? now() + milliseconds(options.wait_timeout_ms)
                                       : SteadyTime::max();
  }
  void make_epoll();
  void watch(int fd);
  void stop_threads();
  void say_goodbye();

  const WorkerOptions options;
  const milliseconds stall_after;
  ControlClient control;  // joins and leaves
  ControlClient pulse;    // the heartbeat thread's
  ControlCalls calls;     // all others
  std::mutex leaving;
  JoinReply reply;
  Credential credential;
  const int spin_us;
  std::unordered_map<std::string_view, size_t> key_by_name;
  std::unique_ptr<WorkerLink> link;
  std::atomic<bool> linked{false};  // `link` is there
  ShmFd epoll;
  ShmFd interruption;  // an eventfd that wakes who sleeps on `epoll`

  mutable std::mutex mutex;
  std::unique_ptr<WorkerTrace> trace;  // guarded by mutex; null: nobody asked
  std::condition_variable polled;
  std::unique_ptr<Session> session;  // guarded by mutex, as what follows
  bool someone_polls = false;
  uint32_t waiters = 0;  // threads in wait()
  bool link_lost = false;
  size_t armed_for = Session::kAnyKey;  // what who polls wants to be woken for
  bool initial_sent = false;
  std::optional<CompletionQueue> announced;
  std::condition_variable announced_any;  // next() sleeps here while nothing is announced
  bool woken = false;                     // for next()
  std::vector<Stall> stalls;              // as the server said when it was last asked, and when
  SteadyTime stalls_time;
  std::vector<Stall> warned;
  // A thread in wait(); the progress thread steps back. REQUIRES: the lock is held.
  struct Waiting {
    Waiting(Impl& worker, size_t key) : impl(worker) {
      ++impl.waiters;
      // Who sleeps may sleep beyond what this one waits for.
      const bool heard = impl.armed_for == Session::kAnyKey || impl.armed_for == key;
      if (impl.someone_polls && !heard) impl.interrupt();
    }
    ~Waiting() {
      --impl.waiters;
      if (impl.progress.joinable() && impl.has_work()) impl.work.notify_one();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Impl& impl;
  };
  // The one thread that polls, or sleeps on `epoll`; whatever ends that, others may poll then.
  // REQUIRES: the lock is held.
  struct Polling {
    Polling(Impl& worker, std::unique_lock<std::mutex>& held) : impl(worker), lock(held) {
      impl.someone_polls = true;
    }
    ~Polling() {
      if (!lock.owns_lock()) lock.lock();
      impl.session->disarm();
      impl.someone_polls = false;
      impl.polled.notify_all();
    }
    Polling(const Polling&) = delete;
    Polling& operator=(const Polling&) = delete;
    Impl& impl;
    std::unique_lock<std::mutex>& lock;
  };
  struct CallerMemory {
    const void* gradient = nullptr;
    void* parameters = nullptr;
    uint64_t copied_round = kNone;
    bool copying = false;
    static constexpr uint64_t kNone = ~uint64_t{0};
  };
  std::vector<CallerMemory> caller_memory;
  uint64_t pushes = 0, reconnections = 0;
  uint64_t furthest_round = 0;  // that any key was pushed for
  std::atomic<uint64_t> bytes_copied{0}, sleeps{0};

  std::mutex failure_mutex;
  std::optional<Error> failure;
  std::atomic<bool> failed{false};

  bool left = false;  // guarded by leaving
  std::mutex heartbeat_mutex;
  std::condition_variable_any heartbeat_wake;
  std::jthread heartbeat;
  std::condition_variable_any work;   // for the progress thread
  std::condition_variable_any pause;  // of the progress thread; only its end ends it
  std::jthread progress;
};

Worker::Impl::Impl(const WorkerOptions& worker_options)
    : options(worker_options),
      stall_after(std::clamp(options.spec.progress_limit_ms / 10, kLeastStallMs, kMostStallMs)),
      control(options.server),
      pulse(options.server),
      calls(options.server),
      reply(join(control, options)),
      credential{reply.spec.name, reply.rank, reply.incarnation, reply.offer.ticket},
      spin_us(spin_us_of({.asked_us = options.spin_us,
                          .cpus = usable_cpus(),
                          .transport = reply.offer.transport,
                          .world_size = reply.spec.world_size,
                          .local_world_size = options.local_world_size})) {
  try {
    make_epoll();
    // Before the connection, which may take longer than the lease.
    heartbeat =
        thread("phub-heartbeat", [this](const std::stop_token& stop) { heartbeat_loop(stop); });
    link = connect(control, reply, credential, options.connect_timeout_ms);
    linked = true;
    session = std::make_unique<Session>(reply, *link);
    if (!options.trace.empty()) {
      trace = std::make_unique<WorkerTrace>(options.trace, reply, options.trace_events);
      session->trace(trace->log());
    }
    for (size_t k = 0; k < reply.spec.keys.size(); ++k) key_by_name[reply.spec.keys[k].name] = k;
    caller_memory.resize(reply.spec.keys.size());
    announced.emplace(reply.spec.keys.size());
    watch(link->endpoint().wake_fd());
    if (link->needs_polling() || link->can_reconnect()) {
      progress =
          thread("phub-progress", [this](const std::stop_token& stop) { progress_loop(stop); });
    }
  } catch (...) {
    stop_threads();
    say_goodbye();
    throw;
  }
}

void Worker::Impl::make_epoll() {
  epoll = ShmFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) fail_system("epoll_create1 of a worker", errno);
  interruption = ShmFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!interruption) fail_system("eventfd of a worker", errno);
  watch(interruption.get());
}

void Worker::Impl::watch(int fd) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of a worker", errno);
  }
}

// A thread of the library's: what it throws is the worker's failure, which the next call gives.
template <typename Body>
std::jthread Worker::Impl::thread(const char* name, Body body) {
  return start_thread(name, [this, body](const std::stop_token& stop) {
    try {
      body(stop);
    } catch (...) {
      record_failure_in_flight();
    }
  });
}

template <typename Body>
auto Worker::Impl::ask(Body body) {
  check_failure();
  try {
    return calls.call(body);
  } catch (...) {
    check_failure();  // is why the call was ended
    throw;
  }
}

// Until all first ranks are there. If they do not come in time, the server's answer names them.
void Worker::Impl::await_ranks() {
  for (milliseconds pause{1};; pause = std::min(2 * pause, kBetweenAttempts)) {
    check_failure();
    try {
      const auto ask_once = [&](ControlClient& client) { return client.heartbeat(credential); };
      if (!ask(ask_once).assembling) return;
    } catch (const Error& error) {
      if (!may_pass(error)) throw;  // the heartbeats' thread knows when it is too much
    }
    std::this_thread::sleep_for(pause);
  }
}

Worker::Impl::~Impl() {
  stop_threads();
  if (!left && !failed) say_goodbye();
}

void Worker::Impl::stop_threads() {
  progress.request_stop();
  if (progress.joinable()) progress.join();
  heartbeat.request_stop();
  pulse.cancel();
  if (heartbeat.joinable()) heartbeat.join();
}

// Leaves without making a fuss: the lease ends it otherwise.
void Worker::Impl::say_goodbye() {
  try {
    control.leave(credential, kGoodbyeMs);
  } catch (...) {  // NOLINT(bugprone-empty-catch): nothing is left to be told
  }
}

void Worker::Impl::heartbeat_loop(const std::stop_token& stop) {
  const milliseconds lease(reply.spec.lease_ms), limit(options.silence_limit_ms);
  const milliseconds shorter = std::min(lease, limit);
  const auto patience = std::max(kLeastHeartbeatMs, static_cast<uint32_t>(shorter.count() / 2));
  SteadyTime last_answer = now();
  std::unique_lock lock(heartbeat_mutex);
  while (!stop.stop_requested() && !failed) {
    lock.unlock();
    try {
      pulse.heartbeat(credential, patience);
      last_answer = now();
    } catch (const Error& error) {
      const auto silence = now() - last_answer;
      // While the link is up the box may still be summing from memory of ours: its word is waited
      // for, but not for ever.
      const bool not_asked = error.code() == ErrorCode::kFull;
      if (!is_silence(error) ||
          (silence > lease && (not_asked || (linked && !link->connected())))) {
        record_failure(error.code(), error.what());
      } else if (silence > limit) {
        record_failure(
            ErrorCode::kUnavailable,
            fmt::format("the phub server at {} has answered no heartbeat for {} ms (the limit is "
                        "{}), although the connection is there: {}",
                        options.server, std::chrono::duration_cast<milliseconds>(silence).count(),
                        options.silence_limit_ms, error.what()));
      }
    }
    lock.lock();
    heartbeat_wake.wait_for(lock, stop, shorter / 3, [] { return false; });
  }
}

void Worker::Impl::record_failure(ErrorCode code, const std::string& message) {
  {
    const std::lock_guard lock(failure_mutex);
    if (!failure) failure.emplace(code, message);
    failed = true;
  }
  // Who has looked at `failed` before sleeps by now, and hears what follows.
  { const std::lock_guard lock(mutex); }
  polled.notify_all();
  announced_any.notify_all();
  interrupt();
  calls.cancel();
  pulse.cancel();
}

void Worker::Impl::record_failure_in_flight() noexcept {
  const Error error = error_in_flight();
  try {
    record_failure(error.code(), error.what());
  } catch (...) {
    failed = true;  // and there was no memory to say why
  }
}

void Worker::Impl::check_failure() {
  if (!failed) return;
  const std::lock_guard lock(failure_mutex);
  if (!failure) fail(ErrorCode::kFull, "this process was out of memory");
  throw Error(failure->code(), failure->what());  // not a copy, which would share its text
}

void Worker::Impl::check_key(size_t key) const {
  if (key >= caller_memory.size()) {
    fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key, reply.spec.name,
         caller_memory.size());
  }
}

// The connection may be gone: the control port knows why.
void Worker::Impl::look_up() {
  check_failure();
  if (link->connected()) return;
  if (link->can_reconnect()) {
    const std::lock_guard lock(mutex);
    if (!link->connected()) link_lost = true;  // nobody has made it again meanwhile
    return;
  }
  const SteadyTime give_up = now() + milliseconds(2 * reply.spec.lease_ms);
  while (!failed) {
    try {
      ask([&](ControlClient& client) { client.heartbeat(credential, kAskMs); });
      if (now() > give_up) {
        record_failure(ErrorCode::kFenced,
                       fmt::format("the connection of rank {} to the server at {} closed",
                                   credential.rank, options.server));
      }
      std::this_thread::sleep_for(milliseconds(10));
    } catch (...) {
      record_failure_in_flight();
    }
  }
  check_failure();
}

// Wakes the thread that sleeps on epoll_fd. Any thread.
void Worker::Impl::interrupt() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interruption.get(), &one, sizeof one);
}

// Makes the broken connection again as long as the server says that this rank is still alive, and
// sends what is unknown once more. REQUIRES: the lock is held, nobody polls; it is released
// meanwhile.
void Worker::Impl::reconnect(std::unique_lock<std::mutex>& lock) {
  const Polling polling(*this, lock);
  session->suspend();
  lock.unlock();
  const uint64_t begin = trace_now_ns();
  make_connection_again();
  lock.lock();
  if (trace) trace->add("reconnect", Session::kAllKeys, 0, begin);
  link_lost = false;
  ++reconnections;
  if (!failed) session->resend();
}

void Worker::Impl::make_connection_again() {
  const SteadyTime give_up = now() + milliseconds(2 * reply.spec.lease_ms);
  while (!failed) {
    try {
      link->reconnect(ask([&](ControlClient& client) {
        return client.reconnect(credential, std::max(1000u, reply.spec.lease_ms));
      }));
      return;
    } catch (...) {
      const Error error = error_in_flight();
      if (!may_pass(error) || now() > give_up) {
        record_failure(error.code(),
                       fmt::format("the connection of rank {} to the server at {} broke: {}",
                                   credential.rank, options.server, error.what()));
      }
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

// Where bytes move only while somebody polls: does that while results are outstanding and no thread
// of the caller's waits for them.
void Worker::Impl::progress_loop(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] { interrupt(); });
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    work.wait(lock, stop, [this] { return has_work(); });
    {
      const Unlocked unlocked(lock);
      std::this_thread::sleep_for(kHelpAfter);
    }
    if (link->needs_polling()) {
      help(stop, lock);
    } else {
      mend(stop, lock);
    }
    if (session->misled()) break;
  }
}

void Worker::Impl::help(const std::stop_token& stop, std::unique_lock<std::mutex>& lock) {
  while (!stop.stop_requested() && has_work() && !session->misled()) {
    if (!someone_polls && move()) continue;
    if ((session->broken() || link_lost) && !someone_polls) {
      reconnect(lock);
    } else {
      sleep(lock, Session::kAllKeys);
    }
  }
}

// Where bytes move by themselves: makes a connection that broke again, for callers that only look
// whether results are there.
void Worker::Impl::mend(const std::stop_token& stop, std::unique_lock<std::mutex>& lock) {
  while (!stop.stop_requested() && has_work() && !session->misled()) {
    if ((session->broken() || link_lost) && !someone_polls) {
      reconnect(lock);
      continue;
    }
    pause.wait_for(lock, stop, milliseconds(kLookUpMs), [] { return false; });
    const Unlocked unlocked(lock);
    look_up();
  }
}

// REQUIRES: the lock is held; it is released while sleeping.
void Worker::Impl::sleep(std::unique_lock<std::mutex>& lock, size_t key) {
  if (someone_polls) {
    polled.wait_for(lock, milliseconds(kLookUpMs));
    return;
  }
  int woken = 1;
  {
    const Polling polling(*this, lock);
    armed_for = waiters > 1 ? Session::kAnyKey : key;
    if (session->arm(armed_for)) {
      const Unlocked unlocked(lock);
      epoll_event event;
      woken = epoll_wait(epoll.get(), &event, 1, kLookUpMs);
      ++sleeps;
    }
  }
  if (woken == 0) {
    const Unlocked unlocked(lock);
    look_up();
  }
}

// Moves what can move without waiting, and tells who waits for what came. True if anything moved.
// REQUIRES: the lock is held, nobody polls.
bool Worker::Impl::move() {
  const bool moved = session->poll();
  for (const uint32_t key : session->completed()) announced->arrived(key);
  if (!session->completed().empty() || session->broken()) polled.notify_all();
  return moved;
}

template <typename Done>
void Worker::Impl::wait_until(size_t key, Done done) {
  std::unique_lock lock(mutex);
  if (reply.send_initial && !initial_sent) {
    fail(ErrorCode::kInvalid,
         "job '{}' begins with rank 0's parameters: rank 0 must call broadcast() first",
         reply.spec.name);
  }
  if (done()) return;
  const SteadyTime begin = now();
  const SteadyTime give_up = key == Session::kAnyKey ? SteadyTime::max() : deadline();
  SteadyTime look = begin + stall_after;
  const uint64_t begin_ns = trace ? trace_now_ns() : 0;
  const Waiting counted(*this, key);
  do {
    check_failure();
    if (!someone_polls && move()) continue;
    if (!someone_polls && !session->misled() && link->can_reconnect() &&
        (session->broken() || link_lost)) {
      reconnect(lock);
      continue;
    }
    if (session->broken() && !someone_polls) {
      const std::string problem = session->problem();
      const Unlocked unlocked(lock);
      look_up();  // the server may have a better reason
      fail(ErrorCode::kInternal, "rank {}: {}", credential.rank, problem);
    }
    if (now() - begin < std::chrono::microseconds(spin_us)) {
      const Unlocked unlocked(lock);
      numa::relax();
      continue;
    }
    if (now() > give_up) {
      const Unlocked unlocked(lock);
      throw timeout_of(key);
    }
    if (now() > look) {
      {
        const Unlocked unlocked(lock);
        look_for_stalls();
      }
      if (const auto error = own_stall(key)) throw Error(error->code(), error->what());
      warn_of_stalls(lock);
      look = now() + stall_after;
      continue;
    }
    sleep(lock, key);
  } while (!done());
  if (trace) trace->add("wait", key, 0, begin_ns);
}

// Announced pushes end in the order in which they do, all of them when the worker fails.
std::optional<Completion> Worker::Impl::next() {
  for (;;) {
    {
      std::unique_lock lock(mutex);
      announced_any.wait(
          lock, [&] { return announced->expected() + announced->ended() > 0 || woken || failed; });
      if (failed) announced->fail_all();
      if (announced->ended() > 0) {
        const CompletionQueue::Ended ended = announced->take();
        lock.unlock();
        return completion_of(ended);
      }
      if (std::exchange(woken, false)) return std::nullopt;
      if (failed) {  // and nothing is left
        lock.unlock();
        check_failure();
      }
    }
    try {
      wait_until(Session::kAnyKey, [&] {
        announced->expire(now());
        return announced->ended() > 0 || announced->expected() == 0 || woken;
      });
    } catch (...) {
      record_failure_in_flight();
    }
  }
}

Completion Worker::Impl::completion_of(const CompletionQueue::Ended& ended) {
  Completion completion{.pushed = ended.pushed, .tag = ended.tag, .error = std::nullopt};
  try {
    if (ended.end == CompletionQueue::End::kFailed) check_failure();
    if (ended.end == CompletionQueue::End::kLate) completion.error = timeout_of(ended.pushed.key);
    if (!completion.error) copy_out(ended.pushed.key);
  } catch (...) {
    completion.error.emplace(error_in_flight());
  }
  return completion;
}

std::vector<uint32_t> Worker::missing_ranks() {
  return only_errors([&] {
    return impl_->ask(
        [&](ControlClient& client) { return client.heartbeat(impl_->credential, kAskMs).missing; });
  });
}

// Many waits may be too long at once: the server is asked once in a while.
void Worker::Impl::look_for_stalls() {
  {
    const std::lock_guard lock(mutex);
    if (now() < stalls_time + stall_after / 2) return;
    stalls_time = now();
  }
  std::vector<Stall> found;
  try {
    const JobStatus status =
        ask([this](ControlClient& client) { return client.job_status(reply.spec.name, kAskMs); });
    found = stalls_of(status, std::chrono::duration<double>(stall_after).count() / 2);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): then nobody knows
  }
  const std::lock_guard lock(mutex);
  stalls = std::move(found);
}

// Each is said once. REQUIRES: the lock is held; it is released while the words are written.
void Worker::Impl::warn_of_stalls(std::unique_lock<std::mutex>& lock) {
  std::string words;
  uint64_t oldest = ~uint64_t{0};
  for (const Stall& stall : stalls) {
    const auto same = [&](const Stall& other) {
      return other.rank == stall.rank && other.key == stall.key && other.round == stall.round;
    };
    oldest = std::min(oldest, stall.round);
    if (std::any_of(warned.begin(), warned.end(), same)) continue;
    words += fmt::format("phub: job '{}', rank {}: {}, which others have waited for {:.1f} s\n",
                         reply.spec.name, credential.rank, describe(stall), stall.seconds);
    warned.push_back(stall);
  }
  std::erase_if(warned, [&](const Stall& stall) { return stall.round < oldest; });
  const Unlocked unlocked(lock);
  std::fputs(words.c_str(), stderr);
}

// Whether others wait for a key that this rank has passed over, while it waits for `key` of a later
// round: each would wait for the other. REQUIRES: the lock is held.
std::optional<Error> Worker::Impl::own_stall(size_t key) const {
  if (key == Session::kAnyKey || reply.spec.consistency != "bsp") return std::nullopt;
  for (const Stall& stall : stalls) {
    const auto at = key_by_name.find(stall.key);
    if (stall.rank != credential.rank || at == key_by_name.end()) continue;
    const size_t lacking = at->second;
    const bool passed_over = session->ready(lacking) && session->round(lacking) + 1 == stall.round;
    if (!passed_over || furthest_round <= stall.round) continue;
    return Error(ErrorCode::kInvalid,
                 fmt::format("{}, which others have waited for {:.1f} s, but has pushed round {} "
                             "already: every rank pushes every key once a round (push_null() where "
                             "the gradient is zero)",
                             describe(stall), stall.seconds, furthest_round));
  }
  return std::nullopt;
}

// A key that this rank passed over has old parameters, and others wait for it.
void Worker::Impl::check_passed_over(size_t key) {
  const std::lock_guard lock(mutex);
  if (stalls.empty() || !session->ready(key)) return;
  for (const Stall& stall : stalls) {
    if (stall.key != reply.spec.keys[key].name) continue;
    if (const auto error = own_stall(key)) throw Error(error->code(), error->what());
  }
}

std::string Worker::Impl::waits_for() {
  const std::lock_guard lock(mutex);
  std::string text;
  if (now() > stalls_time + 3 * stall_after) return text;
  for (const Stall& stall : stalls) {
    text +=
        fmt::format("{}{} for {:.1f} s", text.empty() ? "" : "; ", describe(stall), stall.seconds);
  }
  return text;
}

std::string Worker::Impl::describe_missing() {
  look_for_stalls();
  if (std::string known = waits_for(); !known.empty()) return known;
  try {
    const Pulse heard =
        ask([&](ControlClient& client) { return client.heartbeat(credential, kAskMs); });
    std::string missing;
    for (uint32_t r : heard.missing) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
    return "missing ranks: " + (missing.empty() ? "none (all are slow)" : missing);
  } catch (const Error& error) {
    check_failure();
    return fmt::format("the server does not say why: {}", error.what());
  }
}

Error Worker::Impl::timeout_of(size_t key) {
  return {ErrorCode::kTimeout,
          fmt::format("{} of job '{}' was not complete after {} ms; {}",
                      key >= Session::kAnyKey ? "the round"
                                              : fmt::format("key '{}'", reply.spec.keys[key].name),
                      reply.spec.name, options.wait_timeout_ms, describe_missing())};
}

void Worker::Impl::copy_out(size_t key) {
  CallerMemory& memory = caller_memory[key];
  std::unique_lock lock(mutex);
  await_copies(key, lock);  // another thread waits for the key as well
  if (!memory.parameters || memory.copied_round == session->round(key)) return;
  const std::span<const std::byte> from = session->result(key);
  memory.copied_round = session->round(key);
  const TraceSpan span(trace ? &trace->log() : nullptr,
                       trace ? trace->event("copy out", key, memory.copied_round) : TraceEvent());
  copy(memory, memory.parameters, from, lock);
}

// From the caller's own memory, if there is one. REQUIRES: the lock is held; it is released while
// bytes move.
bool Worker::Impl::copy_in(size_t key, std::unique_lock<std::mutex>& lock) {
  CallerMemory& memory = caller_memory[key];
  await_copies(key, lock);
  if (!memory.gradient) return false;
  const std::span<std::byte> slot = session->gradient(key);
  copy(memory, slot.data(), {static_cast<const std::byte*>(memory.gradient), slot.size()}, lock);
  return true;
}

void Worker::Impl::copy(CallerMemory& memory, void* to, std::span<const std::byte> from,
                        std::unique_lock<std::mutex>& lock) {
  memory.copying = true;
  {
    const Unlocked unlocked(lock);
    std::memcpy(to, from.data(), from.size());
  }
  memory.copying = false;
  bytes_copied += from.size();
  polled.notify_all();
}

// Until nothing is copied to or from the caller's memory for the key; for kAllKeys, for any.
void Worker::Impl::await_copies(size_t key, std::unique_lock<std::mutex>& lock) {
  const auto copying = [](const CallerMemory& memory) { return memory.copying; };
  polled.wait(lock, [&] {
    return key == Session::kAllKeys
               ? std::none_of(caller_memory.begin(), caller_memory.end(), copying)
               : !copying(caller_memory[key]);
  });
}

Pushed Worker::Impl::push(size_t key, const PushOptions& how) {
  check_key(key);
  check_failure();
  wait(key);  // the previous round, if nobody waited for it
  copy_out(key);
  const uint64_t begin = trace ? trace_now_ns() : 0;
  std::unique_lock lock(mutex);
  const bool copied = !how.null && copy_in(key, lock);
  check_failure();
  if (!session->ready(key) || session->sending_initial()) {
    fail(ErrorCode::kInvalid, "key '{}' was pushed while another thread {}",
         reply.spec.keys[key].name,
         session->ready(key) ? "sends the initial parameters" : "pushed it too");
  }
  if (trace && copied) trace->add("copy in", key, session->round(key) + 1, begin);
  const Pushed pushed{.key = key, .round = session->round(key) + 1};
  session->push(key, how.priority, how.null);
  if (how.announced) announced->expect(pushed, how.tag, deadline());
  furthest_round = std::max(furthest_round, pushed.round);
  ++pushes;
  if (how.announced && announced->expected() == 1) announced_any.notify_one();
  if (session->waits_for_room() && someone_polls) interrupt();
  if (progress.joinable() && has_work()) work.notify_one();
  return pushed;
}

Worker::Worker(const WorkerOptions& options)
    : impl_(only_errors([&] { return std::make_unique<Impl>(options); })) {
  if (options.await_ranks) only_errors([&] { impl_->await_ranks(); });
}
Worker::~Worker() = default;

uint32_t Worker::rank() const { return impl_->reply.rank; }
uint32_t Worker::incarnation() const { return impl_->reply.incarnation; }
uint32_t Worker::world_size() const { return impl_->reply.spec.world_size; }
uint64_t Worker::first_round() const { return impl_->reply.first_round; }
bool Worker::initial_counts() const { return impl_->reply.send_initial; }
const JobSpec& Worker::spec() const { return impl_->reply.spec; }
size_t Worker::keys() const { return impl_->reply.spec.keys.size(); }

size_t Worker::key(std::string_view name) const {
  auto at = impl_->key_by_name.find(name);
  if (at == impl_->key_by_name.end()) {
    fail(ErrorCode::kNotFound, "job '{}' has no key '{}'", impl_->reply.spec.name, name);
  }
  return at->second;
}

std::span<std::byte> Worker::gradient_bytes(size_t key) {
  impl_->check_key(key);
  return impl_->session->gradient(key);
}

std::span<float> Worker::gradient(size_t key) {
  if (spec().gradient_dtype != "f32") {
    fail(ErrorCode::kInvalid, "gradients of job '{}' are {}: use gradient_bytes()", spec().name,
         spec().gradient_dtype);
  }
  std::span<std::byte> bytes = gradient_bytes(key);
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<const std::byte> Worker::parameter_bytes(size_t key) const {
  impl_->check_key(key);
  return impl_->session->result(key);
}

std::span<const float> Worker::parameters(size_t key) const {
  if (spec().parameter_dtype != "f32") {
    fail(ErrorCode::kInvalid, "parameters of job '{}' are {}: use parameter_bytes()", spec().name,
         spec().parameter_dtype);
  }
  std::span<const std::byte> bytes = parameter_bytes(key);
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void Worker::use_memory(size_t key, const void* gradient, void* parameters) {
  impl_->check_key(key);
  std::unique_lock lock(impl_->mutex);
  impl_->await_copies(key, lock);  // the old memory may go when this returns
  impl_->caller_memory[key] = {.gradient = gradient, .parameters = parameters};
}

bool Worker::broadcast(std::span<const float> initial) {
  Impl& impl = *impl_;
  impl.check_failure();
  std::unique_lock lock(impl.mutex);
  const bool sends = impl.reply.send_initial && !impl.initial_sent;
  if (sends) {
    uint64_t elements = 0;
    for (const KeySpec& key : spec().keys) elements += key.elements;
    if (initial.size() != elements) {
      fail(ErrorCode::kInvalid, "broadcast: {} initial parameters for keys of {} elements in all",
           initial.size(), elements);
    }
    only_errors([&] {
      std::vector<const float*> at;
      for (const KeySpec& key : spec().keys) {
        at.push_back(initial.data());
        initial = initial.subspan(key.elements);
      }
      impl.session->send_initial([&](size_t key) { return at[key]; });
    });
    impl.initial_sent = true;
  }
  lock.unlock();
  try {
    wait_all();
  } catch (const Error& error) {
    if (sends) {  // the caller's memory may go now
      lock.lock();
      impl.session->forget_initial();
      lock.unlock();
      impl.record_failure(error.code(), error.what());
    }
    throw;
  }
  return sends;
}

Pushed Worker::push(size_t key, const PushOptions& how) {
  return only_errors([&] { return impl_->push(key, how); });
}

void Worker::wait(size_t key) {
  impl_->check_key(key);
  only_errors([&] {
    impl_->check_passed_over(key);
    impl_->wait(key);
    impl_->copy_out(key);
  });
}

void Worker::wait_all() {
  only_errors([&] {
    impl_->wait(Session::kAllKeys);
    for (size_t key = 0; key < keys(); ++key) impl_->copy_out(key);
  });
}

bool Worker::test(size_t key) {
  impl_->check_key(key);
  impl_->check_failure();
  return only_errors([&] {
    {
      const std::lock_guard lock(impl_->mutex);
      if (!impl_->someone_polls) impl_->move();
      if (!impl_->session->ready(key)) return false;
    }
    impl_->copy_out(key);
    return true;
  });
}

size_t Worker::poll() {
  impl_->check_failure();
  return only_errors([&] {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->someone_polls) impl_->move();
    return impl_->session->outstanding();
  });
}

std::optional<Completion> Worker::next() {
  return only_errors([&] { return impl_->next(); });
}

void Worker::wake() {
  const std::lock_guard lock(impl_->mutex);
  impl_->woken = true;
  impl_->announced_any.notify_all();
  impl_->polled.notify_all();
  if (impl_->someone_polls) impl_->interrupt();
}

void Worker::forget_announced() {
  const std::lock_guard lock(impl_->mutex);
  impl_->announced->forget();
}

void Worker::end(const std::string& why) {
  only_errors([&] { impl_->record_failure(ErrorCode::kFenced, why); });
}

void Worker::pull(size_t key, std::span<std::byte> into) {
  wait(key);
  const std::span<const std::byte> from = parameter_bytes(key);
  if (into.size() != from.size()) {
    fail(ErrorCode::kInvalid, "pull: key '{}' has {} bytes, the destination {}",
         spec().keys[key].name, from.size(), into.size());
  }
  std::memcpy(into.data(), from.data(), from.size());
  impl_->bytes_copied += from.size();
}

uint64_t Worker::round(size_t key) const {
  impl_->check_key(key);
  const std::lock_guard lock(impl_->mutex);
  return impl_->session->round(key);
}

uint64_t Worker::set_hyper(const std::map<std::string, double>& values, uint64_t round) {
  uint64_t got = 0;
  only_errors([&] {
    HyperChange change{.round = round, .values = values};
    if (round == 0) {
      const std::lock_guard lock(impl_->mutex);
      change.round = impl_->session->next_round();
    }
    impl_->ask([&](ControlClient& client) { got = client.set_hyper(impl_->credential, change); });
  });
  return got;
}

void Worker::barrier() {
  only_errors([&] {
    impl_->ask([&](ControlClient& client) {
      client.barrier(impl_->credential, impl_->options.wait_timeout_ms);
    });
  });
}

void Worker::leave(uint32_t timeout_ms) {
  only_errors([&] { impl_->leave(timeout_ms); });
}

// Everything else of this worker ends before the server is told: that may take as long as the
// server likes.
void Worker::Impl::leave(uint32_t timeout_ms) {
  const std::lock_guard lock(leaving);
  if (left) return;
  left = !failed;
  heartbeat.request_stop();
  record_failure(ErrorCode::kFenced,
                 fmt::format("rank {} has left job '{}'", credential.rank, credential.job));
  {
    std::unique_lock lock(mutex);
    await_copies(Session::kAllKeys, lock);  // the caller's memory may go when this returns
  }
  if (!left) check_failure();  // what it was before
  control.leave(credential, timeout_ms);
}

WorkerStats Worker::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return {.pushes = impl_->pushes,
          .chunks_pushed = impl_->session->chunks_pushed(),
          .chunks_received = impl_->session->chunks_received(),
          .bytes_copied = impl_->bytes_copied,
          .sleeps = impl_->sleeps,
          .reconnections = impl_->reconnections};
}

std::string Worker::waits_for() const { return impl_->waits_for(); }

std::string Worker::connection() const {
  const std::string details = impl_->link->describe();
  return impl_->reply.offer.transport + (details.empty() ? "" : ": " + details);
}

}  // namespace phub
