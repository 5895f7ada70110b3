// Calls back when the results of pushes are here. One thread per worker, started by the first one;
// it sleeps in Worker::wait_any().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "transport/error.h"
#include "worker/worker.h"

namespace phub {

class Completions {
 public:
  // The error, or null: the result is here. Must not throw.
  using Callback = std::function<void(const Pushed&, const Error*)>;

  // REQUIRES: `worker` outlives this.
  explicit Completions(Worker& worker) : worker_(worker) {}
  ~Completions() { stop(); }
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Pushes the key; `callback` is called once, unless this throws. Any thread.
  void push(size_t key, int32_t priority, Callback callback);

  // Calls what is due, with kFenced; afterwards push() throws that. REQUIRES: not from a callback.
  void stop();

  // Whether this thread is in a callback, of whatever worker.
  static bool in_callback();

 private:
  struct Due {
    Pushed pushed;
    Callback callback;
  };

  void run(const std::stop_token& stop);
  static void finish(const std::list<Due>& due, const Error* error);

  Worker& worker_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::list<Due> due_;    // guarded by mutex_; only the thread takes entries out
  bool stopped_ = false;  // guarded by mutex_
  std::jthread thread_;
};

}  // namespace phub
