// The end of a running job, as its desks see it. Control thread.
#pragma once

#include <string>

#include "transport/error.h"

namespace phub {

class JobEnd {
 public:
  bool has_come() const { return has_come_; }  // the job is over for its ranks
  void come(ErrorCode code, const std::string& error) {
    has_come_ = true;
    code_ = code;
    error_ = error;
  }
  // REQUIRES for these: has_come().
  bool is_good() const { return error_.empty(); }  // the job did not end with an error
  ErrorCode code() const { return code_; }
  const std::string& error() const { return error_; }  // "" if is_good()
  // The answer to calls that still wait; `if_good`: its code if the job did not end with an error.
  Error answer(ErrorCode if_good) const {
    return is_good() ? Error(if_good, "the job has ended") : Error(code_, error_);
  }

 private:
  bool has_come_ = false;
  ErrorCode code_ = ErrorCode::kInternal;
  std::string error_;
};

}  // namespace phub
