// A thread for work that would hold up the control thread, and with it requests and heartbeats. The
// server has three: one decodes and encodes large messages, one plans, makes and frees jobs and
// memory, one writes checkpoints. All may take seconds.
//
// Tasks run in the order of run(). A task returns a function, its end, that finish() calls on the
// control thread. Without start() finish() runs the tasks as well, so that a simulated run is
// deterministic.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "transport/error.h"

namespace phub {

// Calls `work`. Returns what it threw as an Error, or nothing if it returned.
template <typename Work>
std::optional<Error> error_of(Work work) {
  try {
    work();
  } catch (const Error& error) {
    return Error(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::kFull, "the server is out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
  return std::nullopt;
}

class Background {
 public:
  using End = std::function<void()>;
  using Task = std::function<End()>;  // must not throw

  // `name`: the thread's. `nice`: how far it steps back for other threads, as nice(1) has it.
  explicit Background(const char* name = "phub-background", int nice = 0);
  // Tasks and ends that have not run are dropped.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Control thread.
  void start();
  void stop();  // waits for the task that is running
  void run(Task task);
  // Calls the ends of completed tasks, until none is left. Returns whether there were any.
  bool finish();
  void drop();                                // drops the tasks and ends that have not run
  int event_fd() const { return event_fd_; }  // readable while ends wait for finish()

 private:
  void work(const std::stop_token& stop);

  const char* const name_;
  const int nice_;
  int event_fd_ = -1;
  std::mutex mutex_;  // guards what follows
  std::condition_variable_any given_;
  std::deque<Task> tasks_;
  std::deque<End> ends_;
  std::jthread thread_;
};

}  // namespace phub
