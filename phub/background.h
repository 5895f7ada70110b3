// A thread for work that would hold up the control thread, and with it requests and heartbeats. The
// server has three: one decodes and encodes large messages, one plans, makes and frees jobs and
// memory, one writes checkpoints. All may take seconds.
//
// Tasks run in the order of run(). The work of each is followed by its end, which finish() calls on
// the control thread with the exception of the work, if it threw one. Beside the work the thread
// allocates nothing, so an end comes however little memory there is. Without start() finish() does
// the work as well, so that a simulated run is deterministic.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "transport/error.h"

namespace phub {

// The Error for kFull. It is made when the program begins, so that a copy takes no memory.
const Error& out_of_memory();

// Calls `work`. Returns its exception as an Error, or nothing if it returned.
template <typename Work>
std::optional<Error> error_of(Work work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
  return std::nullopt;
}

class Background {
 public:
  using Work = std::function<void()>;
  using End = std::function<void(const std::optional<Error>& failed)>;

  // `name` is the thread's. `nice` is its niceness, as in nice(1).
  explicit Background(const char* name = "phub-background", int nice = 0);
  // Tasks and ends that have not run are dropped.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Control thread.
  void start();
  void stop();  // waits for the task that is running
  void run(Work work, End end = nullptr);
  // Calls the ends of completed tasks, until none is left. Returns whether there were any.
  bool finish();
  void drop();                                // drops the tasks and ends that have not run
  int event_fd() const { return event_fd_; }  // readable while ends wait for finish()

 private:
  struct Task {
    Work work;
    End end;
    std::optional<Error> failed = {};
  };
  static void carry_out(Task& task);
  void work(const std::stop_token& stop);

  const char* const name_;
  const int nice_;
  int event_fd_ = -1;
  std::mutex mutex_;  // guards the members below
  std::condition_variable_any given_;
  std::list<Task> tasks_;
  std::list<Task> ended_;
  std::jthread thread_;
};

}  // namespace phub
