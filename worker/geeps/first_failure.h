// The first failure of a cache.
#pragma once

#include <exception>
#include <string>

#include "transport/error.h"

namespace phub::geeps {

// Guarded by the cache's lock.
class FirstFailure {
 public:
  // Returns whether this is the first.
  bool keep(const std::exception_ptr& error);
  bool happened() const { return !message_.empty(); }
  Error error() const { return Error(code_, message_); }
  void check() const {  // throws it, if there is one
    if (happened()) throw error();
  }

 private:
  ErrorCode code_ = ErrorCode::kInternal;
  std::string message_;  // empty: none
};

}  // namespace phub::geeps
