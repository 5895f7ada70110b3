// Lets the threads of a worker share its session, and sleep until results come.
//
// One lock guards the session and the queue of completions. One of the waiting threads polls the
// link and sleeps on it; the others sleep on a condition variable, and one of them takes over when
// it returns. If the transport needs polling to move bytes, or can reconnect, a thread of the
// library does both while results are outstanding and no thread of the caller waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "transport/fd.h"
#include "worker/link/link_keeper.h"
#include "worker/memory/registered_memory.h"
#include "worker/progress/completion_queue.h"
#include "worker/progress/stalls.h"
#include "worker/progress/worker_trace.h"
#include "worker/session/session.h"

namespace phub {

// Thread-safe, except for start() and stop().
class Sleeper {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // REQUIRES: the arguments outlive this.
  Sleeper(LinkKeeper& keeper, StallWatch& stalls);
  ~Sleeper() { stop(); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // `trace` may be null. REQUIRES: the arguments outlive stop(); the keeper is connected.
  void start(Session& session, CompletionQueue& queue, RegisteredMemory& memory,
             WorkerTrace* trace);
  void stop();

  // The lock that guards session, queue, memory and trace.
  Lock lock() { return Lock(mutex_); }

  // Returns when the key is ready; for Session::kAllKeys, when all keys are; for kAnyKey, when a
  // push has ended, none is in progress, or wake() was called. Throws Error. Releases the lock
  // while it sleeps.
  void wait(Lock& lock, size_t key);
  // Returns the next push that ended, in the order of their end, also if the worker's failure ended
  // it. Returns nullopt if wake() was called. Throws the failure when no push is left. One thread
  // only.
  std::optional<CompletionQueue::Ended> wait_any();
  void wake();  // ends the wait_any() in progress, or else the next one
  // Makes progress without waiting. REQUIRES: the lock is held.
  void poll();
  // REQUIRES: called after each Session::push(); the lock is held.
  void pushed(bool announced);
  // Wakes all threads, so that they see the worker's failure.
  void wake_all();

  // The deadline of a push or wait that begins now.
  SteadyTime deadline() const;
  uint64_t sleeps() const { return sleeps_; }
  uint64_t reconnections() const { return reconnections_; }  // REQUIRES: the lock is held

 private:
  class Waiting;
  class Polling;
  void watch(int fd);
  bool done(size_t key);
  bool has_work() const;
  bool can_poll() const { return !someone_polls_; }
  bool must_reconnect() const;
  bool move();
  void sleep(Lock& lock, size_t key);
  void interrupt();
  void check_link();
  void reconnect(Lock& lock);
  void fail_broken(Lock& lock);
  void explain_delay(Lock& lock, size_t key);
  void progress_loop(const std::stop_token& stop);
  void move_while_nobody_waits(const std::stop_token& stop, Lock& lock);

  LinkKeeper& keeper_;
  StallWatch& stalls_;
  const std::chrono::microseconds spin_;
  Fd epoll_;
  Fd interruption_;  // an eventfd that wakes the thread that sleeps on epoll_

  std::mutex mutex_;
  Session* session_ = nullptr;  // guarded by mutex_, as the members below
  CompletionQueue* queue_ = nullptr;
  RegisteredMemory* memory_ = nullptr;
  WorkerTrace* trace_ = nullptr;
  bool someone_polls_ = false;
  uint32_t waiters_ = 0;  // threads in wait()
  bool link_lost_ = false;
  size_t armed_for_ = Session::kAnyKey;  // the key for which the polling thread sleeps
  bool woken_ = false;                   // wake() was called
  uint64_t reconnections_ = 0;
  std::condition_variable polled_;     // results came, or the polling thread stopped polling
  std::condition_variable announced_;  // wait_any() sleeps here while no push is announced
  std::condition_variable_any work_;   // the progress thread sleeps here while it has no work
  std::condition_variable_any pause_;  // the progress thread pauses here until something waits
  std::atomic<uint64_t> sleeps_{0};
  bool has_progress_thread_ = false;  // set before it starts
  std::jthread progress_;
};

}  // namespace phub
