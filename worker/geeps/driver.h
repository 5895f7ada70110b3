// Runs the lanes of a mover while the application computes, and lets the application wait for them:
// with a thread for each lane or, in tests, a seeded scheduler.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "worker/geeps/mover.h"

namespace phub::geeps {

class Driver {
 public:
  // The mutex is the cache's lock.
  Driver(Mover& mover, std::mutex& mutex) : mover_(mover), mutex_(mutex) {}
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Runs lanes that are due. REQUIRES: the lock is held.
  virtual void wake() = 0;
  // Returns true when over(), or false after `limit` (0: none). Releases the lock meanwhile.
  virtual bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& over,
                    std::chrono::milliseconds limit) = 0;
  // When it returns, no lane is running.
  virtual void stop() = 0;

  // Ends the cache's work: every later call throws `error`. REQUIRES: the lock is not held.
  void fail(const std::exception_ptr& error);

 protected:
  Mover& mover_;
  std::mutex& mutex_;
};

// A thread for each lane. Throws Error(kFull) if no more threads can be started.
std::unique_ptr<Driver> make_threads(Mover& mover, std::mutex& mutex);

}  // namespace phub::geeps
