// Calls a function when the result of a push is here. The calls are made by one thread per worker,
// which the first push starts and which sleeps in Worker::wait_any(). It ignores announced pushes
// without a tag, which are others'.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "transport/error.h"
#include "worker/worker.h"

namespace phub {

class Completions {
 public:
  // The error is null if the result is here. Must not throw.
  using Callback = std::function<void(const Pushed&, const Error*)>;

  // REQUIRES: `worker` outlives this, and nobody else calls its wait_any().
  explicit Completions(Worker& worker) : worker_(worker) {}
  ~Completions() { stop(); }
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Pushes the key; `callback` is called once, unless this throws. Any thread.
  void push(size_t key, int32_t priority, Callback callback);

  // Ends the worker, calls the remaining callbacks with that error, and waits for the thread. Later
  // push() calls fail. REQUIRES: not called by a callback.
  void stop();

  // Whether this thread is in a callback, of any worker.
  static bool in_callback();

 private:
  void run();

  Worker& worker_;
  std::mutex mutex_;
  bool stopped_ = false;  // guarded by mutex_, as the thread until stop()
  std::jthread thread_;
};

}  // namespace phub
