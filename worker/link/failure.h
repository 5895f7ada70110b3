// The error that ended a worker: the first one, which every later call throws.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "transport/error.h"

namespace phub {

// Thread-safe.
class WorkerFailure {
 public:
  bool happened() const { return happened_; }
  void check() const;  // throws the error, if there is one
  bool is(ErrorCode code) const;
  void keep(ErrorCode code, const std::string& message);  // unless there is one already
  void keep_without_message() noexcept { happened_ = true; }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> first_;  // guarded by mutex_; nullopt: there is none, or no message
  std::atomic<bool> happened_{false};
};

}  // namespace phub
