#include "worker/progress/sleeper.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "numa/relax.h"
#include "worker/progress/spin.h"

namespace phub {
namespace {

using std::chrono::milliseconds;
constexpr int kCheckLinkMs = 50;  // how often a sleeping thread checks the connection
// The progress thread polls when no thread has waited for outstanding results for so long.
constexpr std::chrono::microseconds kHelpAfter{500};

// How long to sleep: until a NIC's budget has room for what waits, or to check the connection.
int until_room_ms(const Session& session) {
  const auto room = std::chrono::ceil<milliseconds>(session.room_in()).count();
  return room > 0 ? static_cast<int>(std::min<int64_t>(room, kCheckLinkMs)) : kCheckLinkMs;
}

// Releases a lock until the end of the scope.
class Unlocked {
 public:
  explicit Unlocked(Sleeper::Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Sleeper::Lock& lock_;
};

}  // namespace

// Counts a thread in wait(), so that the progress thread does not poll. REQUIRES: the lock is held.
class Sleeper::Waiting {
 public:
  Waiting(Sleeper& sleeper, size_t key) : sleeper_(sleeper) {
    ++sleeper_.waiters_;
    // The polling thread may sleep for another key.
    const bool woken_too = sleeper_.armed_for_ == Session::kAnyKey || sleeper_.armed_for_ == key;
    if (sleeper_.someone_polls_ && !woken_too) sleeper_.interrupt();
  }
  ~Waiting() {
    --sleeper_.waiters_;
    if (sleeper_.has_work()) sleeper_.work_.notify_one();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Sleeper& sleeper_;
};

// Marks the one thread that polls or sleeps on the link, until the end of the scope. REQUIRES: the
// lock is held.
class Sleeper::Polling {
 public:
  Polling(Sleeper& sleeper, Lock& held) : sleeper_(sleeper), lock_(held) {
    sleeper_.someone_polls_ = true;
  }
  ~Polling() {
    if (!lock_.owns_lock()) lock_.lock();
    sleeper_.session_->disarm();
    sleeper_.someone_polls_ = false;
    sleeper_.polled_.notify_all();
  }
  Polling(const Polling&) = delete;
  Polling& operator=(const Polling&) = delete;

 private:
  Sleeper& sleeper_;
  Lock& lock_;
};

Sleeper::Sleeper(LinkKeeper& keeper, StallWatch& stalls)
    : keeper_(keeper),
      stalls_(stalls),
      spin_(spin_us_of({.asked_us = keeper.options().spin_us,
                        .cpus = usable_cpus(),
                        .transport = keeper.reply().offer.transport,
                        .world_size = keeper.spec().world_size,
                        .local_world_size = keeper.options().local_world_size})) {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) fail_system("epoll_create1 of a worker", errno);
  interruption_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!interruption_) fail_system("eventfd of a worker", errno);
  watch(interruption_.get());
}

void Sleeper::watch(int fd) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of a worker", errno);
  }
}

void Sleeper::start(Session& session, CompletionQueue& queue, RegisteredMemory& memory,
                    WorkerTrace* trace) {
  session_ = &session;
  queue_ = &queue;
  memory_ = &memory;
  trace_ = trace;
  watch(keeper_.link().endpoint().wake_fd());
  has_progress_thread_ = keeper_.link().needs_polling() || keeper_.link().can_reconnect();
  if (has_progress_thread_) {
    progress_ = keeper_.start("phub-progress",
                              [this](const std::stop_token& stop) { progress_loop(stop); });
  }
}

void Sleeper::stop() {
  progress_.request_stop();
  if (progress_.joinable()) progress_.join();
}

SteadyTime Sleeper::deadline() const {
  const uint32_t limit_ms = keeper_.options().wait_timeout_ms;
  return limit_ms > 0 ? now() + milliseconds(limit_ms) : SteadyTime::max();
}

bool Sleeper::done(size_t key) {
  if (key == Session::kAllKeys) return session_->all_ready();
  if (key != Session::kAnyKey) return session_->ready(key);
  if (can_poll()) move();  // what is here is not late, however late this thread is
  queue_->expire(now());
  return queue_->ended() > 0 || queue_->expected() == 0 || woken_;
}

void Sleeper::wait(Lock& lock, size_t key) {
  if (session_->initial().needed()) {
    fail(ErrorCode::kInvalid,
         "job '{}' begins with rank 0's parameters: rank 0 must call broadcast() first",
         keeper_.spec().name);
  }
  if (done(key)) return;
  const SteadyTime begin = now();
  const SteadyTime give_up = key == Session::kAnyKey ? SteadyTime::max() : deadline();
  SteadyTime explain_at = begin + stalls_.stall_after();
  const uint64_t begin_ns = trace_ ? trace_now_ns() : 0;
  const Waiting counted(*this, key);
  do {
    keeper_.failure().check();
    if (can_poll() && move()) continue;
    if (can_poll() && must_reconnect()) {
      reconnect(lock);
    } else if (can_poll() && session_->broken()) {
      fail_broken(lock);
    } else if (now() - begin < spin_) {
      const Unlocked unlocked(lock);
      numa::relax();
    } else if (now() > give_up) {
      const Unlocked unlocked(lock);
      throw stalls_.timeout_of(key);
    } else if (now() > explain_at) {
      explain_delay(lock, key);
      explain_at = now() + stalls_.stall_after();
    } else {
      sleep(lock, key);
    }
  } while (!done(key));
  if (trace_) trace_->add("wait", key, 0, begin_ns);
}

std::optional<CompletionQueue::Ended> Sleeper::wait_any() {
  Lock lock(mutex_);
  for (;;) {
    announced_.wait(lock, [&] {
      return queue_->expected() + queue_->ended() > 0 || woken_ || keeper_.failure().happened();
    });
    if (keeper_.failure().happened()) queue_->fail_all();
    if (queue_->ended() > 0) return queue_->pop();
    if (std::exchange(woken_, false)) return std::nullopt;
    if (keeper_.failure().happened()) keeper_.failure().check();
    try {
      wait(lock, Session::kAnyKey);
    } catch (...) {
      const Unlocked unlocked(lock);
      keeper_.fail_with_exception();
    }
  }
}

void Sleeper::wake() {
  const Lock lock(mutex_);
  woken_ = true;
  announced_.notify_all();
  polled_.notify_all();
  if (someone_polls_) interrupt();
}

void Sleeper::wake_all() {
  // The lock was taken in between, so a thread that saw no failure sleeps by now and is notified.
  { const Lock lock(mutex_); }
  polled_.notify_all();
  announced_.notify_all();
  interrupt();
}

void Sleeper::pushed(bool announced) {
  // A thread that sleeps on the link does not flush; one that polls, or the progress thread, does
  // so soon.
  if (someone_polls_ || session_->flush_is_due()) session_->flush();
  if (announced && queue_->expected() == 1) announced_.notify_one();
  if (session_->waits_for_room() && someone_polls_) interrupt();
  if (session_->waits_for_room()) pause_.notify_one();
  if (has_work()) work_.notify_one();
}

void Sleeper::poll() {
  if (can_poll()) move();
}

// Polls the session once. Returns whether anything happened. REQUIRES: the lock is held, and no
// thread polls.
bool Sleeper::move() {
  const bool moved = session_->poll();
  for (const KeyPart& part : session_->completed_parts()) queue_->arrived(part.key, part.part);
  for (const uint32_t key : session_->completed()) {
    memory_->arrived(key);
    queue_->arrived(key);
  }
  if (!session_->completed().empty() || !session_->completed_parts().empty() ||
      session_->broken()) {
    polled_.notify_all();
  }
  return moved;
}

bool Sleeper::must_reconnect() const {
  return (session_->broken() || link_lost_) && !session_->protocol_violation() &&
         keeper_.link().can_reconnect();
}

// REQUIRES: the lock is held, and the session cannot be reconnected.
void Sleeper::fail_broken(Lock& lock) {
  const std::string problem = session_->problem();
  const Unlocked unlocked(lock);
  check_link();  // the server may know the reason
  fail(ErrorCode::kInternal, "rank {}: {}", keeper_.credential().rank, problem);
}

// Asks the server who holds the job up, says so, and throws if it is this rank itself.
void Sleeper::explain_delay(Lock& lock, size_t key) {
  {
    const Unlocked unlocked(lock);
    stalls_.ask();
  }
  if (const auto error = stalls_.passed_over(*session_, key)) {
    throw Error(error->code(), error->what());
  }
  const Unlocked unlocked(lock);
  stalls_.warn();
}

// REQUIRES: the lock is held; it is released while sleeping.
void Sleeper::sleep(Lock& lock, size_t key) {
  if (someone_polls_) {
    polled_.wait_for(lock, milliseconds(kCheckLinkMs));
    return;
  }
  int events = 1;
  const int limit_ms = until_room_ms(*session_);
  {
    const Polling polling(*this, lock);
    armed_for_ = waiters_ > 1 ? Session::kAnyKey : key;
    if (session_->arm(armed_for_)) {
      const Unlocked unlocked(lock);
      epoll_event event;
      events = epoll_wait(epoll_.get(), &event, 1, limit_ms);
      ++sleeps_;
    }
  }
  if (events == 0 && limit_ms == kCheckLinkMs) {
    const Unlocked unlocked(lock);
    check_link();
  }
}

// Wakes the thread that sleeps on epoll_. Any thread.
void Sleeper::interrupt() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interruption_.get(), &one, sizeof one);
}

// REQUIRES: the lock is not held.
void Sleeper::check_link() {
  if (keeper_.check_link()) return;
  const Lock lock(mutex_);
  if (!keeper_.link().connected()) link_lost_ = true;  // unless another thread has reconnected
}

// Reconnects, and sends again what may not have arrived. Releases the lock meanwhile. REQUIRES: the
// lock is held, and no thread polls.
void Sleeper::reconnect(Lock& lock) {
  const Polling polling(*this, lock);
  session_->suspend();
  const uint64_t begin_ns = trace_now_ns();
  {
    const Unlocked unlocked(lock);
    keeper_.reconnect();
  }
  if (trace_) trace_->add("reconnect", Session::kAllKeys, 0, begin_ns);
  link_lost_ = false;
  ++reconnections_;
  if (!keeper_.failure().happened()) session_->resend();
}

// Whether results are outstanding that no thread of the caller waits for.
bool Sleeper::has_work() const {
  return has_progress_thread_ && waiters_ == 0 && !session_->all_ready() &&
         !keeper_.failure().happened();
}

void Sleeper::progress_loop(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] { interrupt(); });
  Lock lock(mutex_);
  while (!stop.stop_requested() && !session_->protocol_violation()) {
    work_.wait(lock, stop, [this] { return has_work(); });
    {
      const Unlocked unlocked(lock);
      std::this_thread::sleep_for(kHelpAfter);
    }
    move_while_nobody_waits(stop, lock);
  }
}

// If bytes move without polling it only posts what waits for room, and reconnects, for callers that
// test() and never wait.
void Sleeper::move_while_nobody_waits(const std::stop_token& stop, Lock& lock) {
  const bool needs_polling = keeper_.link().needs_polling();
  while (!stop.stop_requested() && has_work() && !session_->protocol_violation()) {
    const bool polls = needs_polling || session_->waits_for_room();
    if (polls && can_poll() && move()) continue;
    if (can_poll() && must_reconnect()) {
      reconnect(lock);
    } else if (polls) {
      sleep(lock, Session::kAllKeys);
    } else {
      pause_.wait_for(lock, stop, milliseconds(kCheckLinkMs),
                      [this] { return session_->waits_for_room(); });
      const Unlocked unlocked(lock);
      check_link();
    }
  }
}

}  // namespace phub
