// For exchanges: the keys that next() is to return, and the failure that every call throws.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "transport/error.h"

namespace phub::geeps {

// Keeps the first error. Not thread-safe.
class Failure {
 public:
  void keep(const std::exception& error);
  void check() const;  // throws it
  explicit operator bool() const { return set_; }

 private:
  bool set_ = false;
  ErrorCode code_ = ErrorCode::kInternal;
  std::string what_;
};

// Thread-safe, but only one thread may call next().
class KeyQueue {
 public:
  void add(size_t key);
  void fail(const std::exception& error);
  void stop();
  void check() const;            // throws the failure
  std::optional<size_t> next();  // blocks; nullopt after stop(); throws the failure

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<size_t> keys_;
  Failure failure_;
  bool stopped_ = false;
};

}  // namespace phub::geeps
