// Calls back when the results of pushes are here. One thread per worker, started by the first one;
// it sleeps in Worker::next(). Pushes that others announced, without a tag, are not called back.
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
  // The error, or null: the result is here. Must not throw.
  using Callback = std::function<void(const Pushed&, const Error*)>;

  // REQUIRES: `worker` outlives this, and nobody else calls its next().
  explicit Completions(Worker& worker) : worker_(worker) {}
  ~Completions() { stop(); }
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Pushes the key; `callback` is called once, unless this throws. Any thread.
  void push(size_t key, int32_t priority, Callback callback);

  // Ends the worker, calls what is due with that error, and waits for the thread; push() fails from
  // now on. REQUIRES: not from a callback.
  void stop();

  // Whether this thread is in a callback, of whatever worker.
  static bool in_callback();

 private:
  void run();

  Worker& worker_;
  std::mutex mutex_;
  bool stopped_ = false;  // guarded by mutex_, as the thread until stop()
  std::jthread thread_;
};

}  // namespace phub
