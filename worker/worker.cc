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
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "transport/control_client.h"
#include "worker/connect.h"
#include "worker/session.h"
#include "worker/worker_trace.h"

namespace phub {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;
constexpr int kLookUpMs = 50;  // how often a sleeper looks whether the connection is still there
constexpr uint32_t kAskMs = 1000;             // who is missing
constexpr milliseconds kBetweenAttempts{20};  // to reconnect
constexpr std::chrono::microseconds kHelpAfter{
    500};  // nobody waits: then the progress thread polls

SteadyTime now() { return std::chrono::steady_clock::now(); }

// A server that is being started beside its workers is waited for.
JoinReply join(ControlClient& control, const WorkerOptions& options) {
  validate(options.spec);
  const SteadyTime give_up = now() + milliseconds(options.connect_timeout_ms);
  for (;;) {
    try {
      return control.join({.spec = options.spec,
                           .rank = options.rank,
                           .replace = options.replace,
                           .transport = choose_transport(options.transport, options.server,
                                                         options.connect_timeout_ms)},
                          options.connect_timeout_ms + options.spec.join_limit_ms);
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

int spin_of(const WorkerOptions& options) {
  if (options.spin_us >= 0) return options.spin_us;
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  return cpus > static_cast<long>(options.spec.world_size) + 1 ? 50 : 0;
}

}  // namespace

struct Worker::Impl {
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
  void sleep(std::unique_lock<std::mutex>& lock, size_t key);
  void copy_out(size_t key);
  Pushed push(size_t key, int32_t priority, bool null);
  void check_key(size_t key) const;
  void check_failure();
  void look_up();
  void reconnect(std::unique_lock<std::mutex>& lock);
  void progress_loop(const std::stop_token& stop);
  void interrupt();
  bool has_work() const { return waiters == 0 && !session->all_ready() && !failed; }
  void record_failure(ErrorCode code, const std::string& message);
  void heartbeat_loop(const std::stop_token& stop);
  [[noreturn]] void time_out(size_t key);
  void say_goodbye();

  const WorkerOptions options;
  const int spin_us;
  ControlClient control;  // for the caller's requests
  std::mutex control_mutex;
  JoinReply reply;
  Credential credential;
  std::unordered_map<std::string_view, size_t> key_by_name;
  std::unique_ptr<WorkerLink> link;
  int epoll_fd = -1;
  int interrupt_fd = -1;  // wakes who sleeps on epoll_fd

  mutable std::mutex mutex;
  std::unique_ptr<WorkerTrace> trace;  // guarded by mutex; null: nobody asked
  std::condition_variable polled;
  std::unique_ptr<Session> session;  // guarded by mutex, as what follows
  bool someone_polls = false;
  uint32_t waiters = 0;  // threads in wait()
  bool link_lost = false;
  bool initial_sent = false;
  bool woken = false;  // for wait_any()
  // A thread in wait(); the progress thread steps back. REQUIRES: the lock is held.
  struct Waiting {
    explicit Waiting(Impl& worker) : impl(worker) {
      ++impl.waiters;
      if (impl.someone_polls) impl.interrupt();  // it knows nothing of what this one waits for
    }
    ~Waiting() {
      --impl.waiters;
      if (impl.progress.joinable() && impl.has_work()) impl.work.notify_one();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Impl& impl;
  };
  struct CallerMemory {
    const void* gradient = nullptr;
    void* parameters = nullptr;
    uint64_t copied_round = kNone;
    bool copying = false;
    static constexpr uint64_t kNone = ~uint64_t{0};
  };
  std::vector<CallerMemory> caller_memory;
  uint64_t pushes = 0, sleeps = 0, reconnections = 0;
  std::atomic<uint64_t> bytes_copied{0};

  std::mutex failure_mutex;
  std::optional<Error> failure;
  std::atomic<bool> failed{false};

  bool left = false;
  std::mutex heartbeat_mutex;
  std::condition_variable_any heartbeat_wake;
  std::jthread heartbeat;
  std::condition_variable_any work;  // for the progress thread
  std::jthread progress;
};

Worker::Impl::Impl(const WorkerOptions& worker_options)
    : options(worker_options),
      spin_us(spin_of(options)),
      control(options.server),
      reply(join(control, options)),
      credential{reply.spec.name, reply.rank, reply.incarnation, reply.offer.ticket} {
  try {
    link = connect(control, reply, credential, options.connect_timeout_ms);
    session = std::make_unique<Session>(reply, *link);
    if (!options.trace.empty()) {
      trace = std::make_unique<WorkerTrace>(options.trace, reply, options.trace_events);
      session->trace(trace->log());
    }
  } catch (...) {
    say_goodbye();
    throw;
  }
  for (size_t k = 0; k < reply.spec.keys.size(); ++k) key_by_name[reply.spec.keys[k].name] = k;
  caller_memory.resize(reply.spec.keys.size());
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  interrupt_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
  if (epoll_fd < 0 || interrupt_fd < 0 ||
      epoll_ctl(epoll_fd, EPOLL_CTL_ADD, link->endpoint().wake_fd(), &event) != 0 ||
      epoll_ctl(epoll_fd, EPOLL_CTL_ADD, interrupt_fd, &event) != 0) {
    say_goodbye();
    fail(ErrorCode::kFull, "epoll: {}; raise ulimit -n", std::strerror(errno));
  }
  heartbeat = std::jthread([this](const std::stop_token& stop) { heartbeat_loop(stop); });
  if (link->needs_polling()) {
    progress = std::jthread([this](const std::stop_token& stop) { progress_loop(stop); });
  }
}

Worker::Impl::~Impl() {
  progress.request_stop();
  if (progress.joinable()) progress.join();
  heartbeat.request_stop();
  heartbeat_wake.notify_all();
  if (heartbeat.joinable()) heartbeat.join();
  if (!left && !failed) say_goodbye();
  if (epoll_fd >= 0) close(epoll_fd);
  if (interrupt_fd >= 0) close(interrupt_fd);
}

// Leaves without making a fuss: the lease ends it otherwise.
void Worker::Impl::say_goodbye() {
  try {
    const std::lock_guard lock(control_mutex);
    control.leave(credential, 2000);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nothing is left to be told
  }
}

void Worker::Impl::heartbeat_loop(const std::stop_token& stop) {
  ControlClient pulse(options.server);
  const milliseconds lease(reply.spec.lease_ms);
  SteadyTime last_answer = now();
  std::unique_lock lock(heartbeat_mutex);
  while (!stop.stop_requested() && !failed) {
    lock.unlock();
    try {
      pulse.heartbeat(credential, std::max<uint32_t>(100, reply.spec.lease_ms / 2));
      last_answer = now();
    } catch (const Error& error) {
      const bool unanswered =
          error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout;
      // While the link is up the box may still be summing from memory of ours: wait for its word.
      if (!unanswered || (now() - last_answer > lease && !link->connected())) {
        record_failure(error.code(), error.what());
      }
    }
    lock.lock();
    heartbeat_wake.wait_for(lock, stop, lease / 3, [] { return false; });
  }
}

void Worker::Impl::record_failure(ErrorCode code, const std::string& message) {
  const std::lock_guard lock(failure_mutex);
  if (!failure) failure.emplace(code, message);
  failed = true;
  polled.notify_all();
}

void Worker::Impl::check_failure() {
  if (!failed) return;
  const std::lock_guard lock(failure_mutex);
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
    link_lost = true;
    return;
  }
  const SteadyTime give_up = now() + milliseconds(2 * reply.spec.lease_ms);
  ControlClient pulse(options.server);
  while (!failed) {
    try {
      pulse.heartbeat(credential, 1000);
      if (now() > give_up) {
        record_failure(ErrorCode::kFenced,
                       fmt::format("the connection of rank {} to the server at {} closed",
                                   credential.rank, options.server));
      }
      std::this_thread::sleep_for(milliseconds(10));
    } catch (const Error& error) {
      record_failure(error.code(), error.what());
    }
  }
  check_failure();
}

// Wakes the thread that sleeps on epoll_fd. Any thread.
void Worker::Impl::interrupt() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interrupt_fd, &one, sizeof one);
}

// Makes the broken connection again as long as the server says that this rank is still alive, and
// sends what is unknown once more. REQUIRES: the lock is held, nobody polls; it is released
// meanwhile.
void Worker::Impl::reconnect(std::unique_lock<std::mutex>& lock) {
  someone_polls = true;
  lock.unlock();
  const uint64_t begin = trace_now_ns();
  const SteadyTime give_up = now() + milliseconds(2 * reply.spec.lease_ms);
  ControlClient requests(options.server);
  for (bool again = true; again && !failed;) {
    try {
      link->reconnect(requests.reconnect(credential, std::max(1000u, reply.spec.lease_ms)));
      again = false;
    } catch (const Error& error) {
      if (!may_pass(error) || now() > give_up) {
        record_failure(error.code(),
                       fmt::format("the connection of rank {} to the server at {} broke: {}",
                                   credential.rank, options.server, error.what()));
      } else {
        std::this_thread::sleep_for(kBetweenAttempts);
      }
    }
  }
  lock.lock();
  if (trace) trace->add("reconnect", Session::kAllKeys, 0, begin);
  someone_polls = link_lost = false;
  ++reconnections;
  if (!failed) session->resend();
  polled.notify_all();
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
    while (!stop.stop_requested() && has_work() && !session->misled()) {
      try {
        if (!someone_polls && session->poll()) {
          polled.notify_all();
        } else if ((session->broken() || link_lost) && !someone_polls) {
          reconnect(lock);
        } else {
          sleep(lock, Session::kAllKeys);
        }
      } catch (const Error&) {  // kept, for whoever asks next
        break;
      }
    }
    if (session->misled()) break;
  }
}

// REQUIRES: the lock is held; it is released while sleeping.
void Worker::Impl::sleep(std::unique_lock<std::mutex>& lock, size_t key) {
  if (someone_polls) {
    polled.wait_for(lock, milliseconds(kLookUpMs));
    return;
  }
  someone_polls = true;
  int woken = 0;
  if (session->arm(waiters > 1 ? Session::kAnyKey : key)) {
    lock.unlock();
    epoll_event event;
    woken = epoll_wait(epoll_fd, &event, 1, kLookUpMs);
    lock.lock();
    ++sleeps;
  } else {
    woken = 1;
  }
  session->disarm();
  someone_polls = false;
  polled.notify_all();
  if (woken == 0) {
    const Unlocked unlocked(lock);
    look_up();
  }
}

template <typename Done>
void Worker::Impl::wait_until(size_t key, Done done) {
  const SteadyTime begin = now();
  std::unique_lock lock(mutex);
  const Waiting counted(*this);
  const uint64_t begin_ns = trace ? trace_now_ns() : 0;
  bool waited_at_all = false;
  if (reply.send_initial && !initial_sent) {
    fail(ErrorCode::kInvalid,
         "job '{}' begins with rank 0's parameters: rank 0 must call broadcast() first",
         reply.spec.name);
  }
  while (!done()) {  // which may take a wake() away: once per look
    waited_at_all = true;
    check_failure();
    if (!someone_polls && session->poll()) {
      polled.notify_all();
      continue;
    }
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
    const auto waited = now() - begin;
    if (waited < std::chrono::microseconds(spin_us)) {
      const Unlocked unlocked(lock);
      __builtin_ia32_pause();
      continue;
    }
    if (options.wait_timeout_ms > 0 && waited > milliseconds(options.wait_timeout_ms)) {
      const Unlocked unlocked(lock);
      time_out(key);
    }
    sleep(lock, key);
  }
  if (trace && waited_at_all) trace->add("wait", key, 0, begin_ns);
}

std::vector<uint32_t> Worker::missing_ranks() {
  const Pulse pulse = ControlClient(impl_->options.server).heartbeat(impl_->credential, kAskMs);
  return {pulse.missing.begin(), pulse.missing.end()};
}

void Worker::Impl::time_out(size_t key) {
  const Pulse pulse = ControlClient(options.server).heartbeat(credential, kAskMs);
  std::string missing;
  for (uint32_t r : pulse.missing) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
  fail(ErrorCode::kTimeout, "{} of job '{}' was not complete after {} ms; missing ranks: {}",
       key >= Session::kAnyKey ? "the round" : fmt::format("key '{}'", reply.spec.keys[key].name),
       reply.spec.name, options.wait_timeout_ms, missing.empty() ? "none (all are slow)" : missing);
}

void Worker::Impl::copy_out(size_t key) {
  CallerMemory& memory = caller_memory[key];
  std::unique_lock lock(mutex);
  polled.wait(lock, [&] { return !memory.copying; });  // another thread waits for the key as well
  if (!memory.parameters || memory.copied_round == session->round(key)) return;
  const std::span<const std::byte> from = session->result(key);
  memory.copied_round = session->round(key);
  memory.copying = true;
  const TraceSpan span(trace ? &trace->log() : nullptr,
                       trace ? trace->event("copy out", key, memory.copied_round) : TraceEvent());
  {
    const Unlocked unlocked(lock);
    std::memcpy(memory.parameters, from.data(), from.size());
  }
  memory.copying = false;
  bytes_copied += from.size();
  polled.notify_all();
}

Pushed Worker::Impl::push(size_t key, int32_t priority, bool null) {
  check_key(key);
  check_failure();
  wait(key);  // the previous round, if nobody waited for it
  copy_out(key);
  const uint64_t begin = trace ? trace_now_ns() : 0;
  const void* from = null ? nullptr : caller_memory[key].gradient;
  if (from) {
    std::span<std::byte> slot = session->gradient(key);
    std::memcpy(slot.data(), from, slot.size());
    bytes_copied += slot.size();
  }
  const std::lock_guard lock(mutex);
  check_failure();
  if (!session->ready(key) || session->sending_initial()) {
    fail(ErrorCode::kInvalid, "key '{}' was pushed while another thread {}",
         reply.spec.keys[key].name,
         session->ready(key) ? "sends the initial parameters" : "pushed it too");
  }
  if (trace && from) trace->add("copy in", key, session->round(key) + 1, begin);
  session->push(key, priority, null);
  ++pushes;
  if (progress.joinable() && has_work()) work.notify_one();
  return {.key = key, .round = session->round(key) + 1};
}

Worker::Worker(const WorkerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Worker::~Worker() = default;

uint32_t Worker::rank() const { return impl_->reply.rank; }
uint32_t Worker::incarnation() const { return impl_->reply.incarnation; }
uint32_t Worker::world_size() const { return impl_->reply.spec.world_size; }
uint64_t Worker::first_round() const { return impl_->reply.first_round; }
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
  const std::lock_guard lock(impl_->mutex);
  impl_->caller_memory[key] = {.gradient = gradient, .parameters = parameters};
}

void Worker::broadcast(std::span<const float> initial) {
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
    std::vector<const float*> at;
    for (const KeySpec& key : spec().keys) {
      at.push_back(initial.data());
      initial = initial.subspan(key.elements);
    }
    impl.session->send_initial([&](size_t key) { return at[key]; });
    impl.initial_sent = true;
  }
  lock.unlock();
  try {
    wait_all();
  } catch (const Error& error) {
    if (sends) {  // the caller's memory may go now
      lock.lock();
      impl.session->forget_initial();
      impl.record_failure(error.code(), error.what());
    }
    throw;
  }
}

Pushed Worker::push(size_t key, int32_t priority) { return impl_->push(key, priority, false); }
Pushed Worker::push_null(size_t key) { return impl_->push(key, 0, true); }

void Worker::wait(size_t key) {
  impl_->check_key(key);
  impl_->wait(key);
  impl_->copy_out(key);
}

void Worker::wait_all() {
  impl_->wait(Session::kAllKeys);
  for (size_t key = 0; key < keys(); ++key) impl_->copy_out(key);
}

bool Worker::test(size_t key) {
  impl_->check_key(key);
  impl_->check_failure();
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->someone_polls && impl_->session->poll()) impl_->polled.notify_all();
    if (!impl_->session->ready(key)) return false;
  }
  impl_->copy_out(key);
  return true;
}

size_t Worker::poll() {
  impl_->check_failure();
  const std::lock_guard lock(impl_->mutex);
  if (!impl_->someone_polls && impl_->session->poll()) impl_->polled.notify_all();
  return impl_->session->outstanding();
}

std::optional<size_t> Worker::wait_any(std::span<const Pushed> pushed) {
  for (const Pushed& one : pushed) impl_->check_key(one.key);
  std::optional<size_t> first;
  impl_->wait_until(Session::kAnyKey, [&] {
    for (size_t i = 0; i < pushed.size() && !first; ++i) {
      if (impl_->session->round(pushed[i].key) >= pushed[i].round) first = i;
    }
    return first || std::exchange(impl_->woken, false);
  });
  if (first) impl_->copy_out(pushed[*first].key);
  return first;
}

void Worker::wake() {
  const std::lock_guard lock(impl_->mutex);
  impl_->woken = true;
  impl_->polled.notify_all();
  if (impl_->someone_polls) impl_->interrupt();
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

void Worker::set_hyper(const std::map<std::string, double>& values) {
  impl_->check_failure();
  const std::lock_guard lock(impl_->control_mutex);
  impl_->control.set_hyper(impl_->credential, values);
}

// On a connection of its own: others may ask for something while this waits.
void Worker::barrier() {
  impl_->check_failure();
  ControlClient(impl_->options.server).barrier(impl_->credential, impl_->options.wait_timeout_ms);
}

void Worker::leave() {
  Impl& impl = *impl_;
  const std::lock_guard lock(impl.control_mutex);
  if (impl.left) return;
  impl.check_failure();
  impl.left = true;
  impl.heartbeat.request_stop();
  try {
    impl.control.leave(impl.credential);
  } catch (const Error& error) {
    impl.record_failure(error.code(), error.what());
    throw;
  }
  impl.record_failure(ErrorCode::kFenced,
                      fmt::format("rank {} has left job '{}'", rank(), spec().name));
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

std::string Worker::connection() const {
  const std::string details = impl_->link->describe();
  return impl_->reply.offer.transport + (details.empty() ? "" : ": " + details);
}

}  // namespace phub
