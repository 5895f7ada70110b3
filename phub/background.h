// Work that takes long, beside the control thread. Others' requests and heartbeats do not wait for
// it. The server has two: one decodes and encodes what is large, the other plans, makes and frees
// jobs and memory, which may take seconds.
//
// Tasks run one after another, in the order in which they were given. What is to be done with a
// task's result runs on the control thread, in finish(). Where no thread was started the tasks run
// there as well: a simulated run stays the same.
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

// What `work` failed with, whatever its type; nothing if it did not.
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

  explicit Background(const char* name = "phub-background");  // of its thread
  // Tasks and ends that have not run never will.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Control thread.
  void start();
  void stop();  // after the task that is running
  void run(Task task);
  // The ends of the tasks that are done, and of those that they give. False: there were none.
  bool finish();
  void drop();                                // what has not run, and never will
  int event_fd() const { return event_fd_; }  // readable when there are ends

 private:
  void work(const std::stop_token& stop);

  const char* const name_;
  int event_fd_ = -1;
  std::mutex mutex_;  // guards what follows
  std::condition_variable_any given_;
  std::deque<Task> tasks_;
  std::deque<End> ends_;
  std::jthread thread_;
};

}  // namespace phub
