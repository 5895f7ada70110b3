#include "worker/link/failure.h"

namespace phub {

void WorkerFailure::check() const {
  if (!happened_) return;
  const std::lock_guard lock(mutex_);
  if (!first_) fail(ErrorCode::kFull, "this process was out of memory");
  throw Error(first_->code(), first_->what());  // not a copy, which would share its text
}

bool WorkerFailure::is(ErrorCode code) const {
  const std::lock_guard lock(mutex_);
  return first_ && first_->code() == code;
}

void WorkerFailure::keep(ErrorCode code, const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!first_) first_.emplace(code, message);
  happened_ = true;
}

}  // namespace phub
