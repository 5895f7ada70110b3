#include "worker/iterstore/meeting.h"

#include <algorithm>
#include <string_view>

#include "worker/any_error.h"

namespace phub::iterstore {

void Meeting::enter(uint32_t thread) {
  const std::lock_guard lock(mutex_);
  if (thread >= present_.size()) {
    fail(ErrorCode::kInvalid, "thread {} of a store of {} threads: they are 0 to {}", thread,
         present_.size(), present_.size() - 1);
  }
  if (present_[thread]) {
    fail(ErrorCode::kInvalid, "thread {} of the store has a StoreThread already", thread);
  }
  present_[thread] = true;
  gone_[thread] = false;
}

void Meeting::leave(uint32_t thread) {
  const std::lock_guard lock(mutex_);
  present_[thread] = false;
  gone_[thread] = true;
  const bool all = std::ranges::find(gone_, false) == gone_.end();
  if (all) gone_.assign(gone_.size(), false);  // they may come again
  if (here_ > 0) all_here_.notify_all();       // nobody will come for it
}

bool Meeting::is_empty() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::find(present_, true) == present_.end();
}

bool Meeting::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

void Meeting::check() const {
  if (failure_) throw Error(failure_->code(), failure_->what());
}

void Meeting::fail_with(const Error& error) {
  failure_.emplace(error.code(), error.what());
  all_here_.notify_all();
}

void Meeting::run(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    fail_with(error_in_flight());
  }
  check();
}

void Meeting::meet(const char* what, const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  check();
  if (what != nullptr && what_ != nullptr && std::string_view(what_) != what) {
    fail_with(Error(
        ErrorCode::kInvalid,
        fmt::format("one thread of the store calls {}() where another calls {}()", what, what_)));
    check();
  }
  if (what != nullptr) what_ = what;
  if (++here_ == present_.size()) {
    here_ = 0;
    what_ = nullptr;
    run(work);
    ++meetings_;
    all_here_.notify_all();
    return;
  }
  const uint64_t this_one = meetings_;
  for (;;) {
    check();
    if (meetings_ != this_one) return;
    if (piece_ != nullptr && next_piece_ < pieces_) {
      ++takers_;
      take_pieces(lock);
      if (--takers_ == 0) all_taken_.notify_one();
      continue;
    }
    const auto gone = std::ranges::find(gone_, true);
    if (gone != gone_.end()) {
      fail_with(Error(ErrorCode::kInvalid,
                      fmt::format("thread {} of the store is gone, and others wait for it in {}",
                                  gone - gone_.begin(),
                                  what == nullptr ? "an access to a row that was not recorded"
                                                  : fmt::format("{}()", what))));
      continue;
    }
    all_here_.wait(lock);
  }
}

// The mutex is free meanwhile. Nobody else comes for it: all threads are in meet().
void Meeting::take_pieces(std::unique_lock<std::mutex>& lock) {
  const std::function<void(size_t)>& piece = *piece_;
  std::optional<Error> error;
  lock.unlock();
  try {
    for (size_t p = next_piece_++; p < pieces_; p = next_piece_++) piece(p);
  } catch (...) {
    error.emplace(error_in_flight());
    next_piece_ = pieces_;
  }
  lock.lock();
  if (error && !failure_) fail_with(*error);
}

void Meeting::share(size_t pieces, const std::function<void(size_t)>& piece) {
  if (pieces < 2 || present_.size() < 2) {
    for (size_t p = 0; p < pieces; ++p) piece(p);
    return;
  }
  std::unique_lock lock(mutex_, std::adopt_lock);
  piece_ = &piece;
  pieces_ = pieces;
  next_piece_ = 0;
  all_here_.notify_all();
  take_pieces(lock);
  piece_ = nullptr;
  all_taken_.wait(lock, [this] { return takers_ == 0; });
  lock.release();  // meet() has it
  check();
}

void Meeting::alone(const std::function<void()>& work) {
  const std::lock_guard lock(mutex_);
  check();
  run(work);
}

}  // namespace phub::iterstore
