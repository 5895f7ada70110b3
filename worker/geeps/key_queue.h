// The keys that are here again, for Exchange::next(); and the failure of an exchange, which stays.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "transport/error.h"

namespace phub::geeps {

// The first one is kept. Not thread-safe.
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

// Thread-safe, but for next(), which is for one thread.
class KeyQueue {
 public:
  void add(size_t key);
  void fail(const std::exception& error);
  void stop();
  void check() const;            // throws the failure
  std::optional<size_t> next();  // blocks; nothing after stop(); throws the failure

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<size_t> keys_;
  Failure failure_;
  bool stopped_ = false;
};

}  // namespace phub::geeps
