#include "worker/geeps/key_queue.h"

namespace phub::geeps {

void Failure::keep(const std::exception& error) {
  if (set_) return;
  const auto* const ours = dynamic_cast<const Error*>(&error);
  set_ = true;
  code_ = ours ? ours->code() : ErrorCode::kInternal;
  what_ = error.what();
}

// A new Error each time: threads would share the text of a copy.
void Failure::check() const {
  if (set_) throw Error(code_, what_);
}

void KeyQueue::add(size_t key) {
  {
    const std::lock_guard lock(mutex_);
    keys_.push_back(key);
  }
  changed_.notify_one();
}

void KeyQueue::fail(const std::exception& error) {
  {
    const std::lock_guard lock(mutex_);
    failure_.keep(error);
  }
  changed_.notify_one();
}

void KeyQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_one();
}

void KeyQueue::check() const {
  const std::lock_guard lock(mutex_);
  failure_.check();
}

std::optional<size_t> KeyQueue::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || failure_ || !keys_.empty(); });
  if (stopped_) return std::nullopt;
  failure_.check();
  const size_t key = keys_.front();
  keys_.pop_front();
  return key;
}

}  // namespace phub::geeps
