#include "worker/completions.h"

#include <iterator>
#include <utility>
#include <vector>

namespace phub {
namespace {

thread_local bool calling_back = false;

}  // namespace

bool Completions::in_callback() { return calling_back; }

void Completions::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  thread_.request_stop();
  worker_.wake();
  if (thread_.joinable()) thread_.join();
}

// The entry is made first: nothing that is pushed can be forgotten.
void Completions::push(size_t key, int32_t priority, Callback callback) {
  std::list<Due> due;
  due.push_back({.pushed = {}, .callback = std::move(callback)});
  const auto check_stopped = [this] {
    if (stopped_) fail(ErrorCode::kFenced, "the worker is being destroyed");
  };
  {
    const std::lock_guard lock(mutex_);
    check_stopped();
    if (!thread_.joinable()) {
      thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    }
  }
  due.front().pushed = worker_.push(key, priority);
  {
    const std::lock_guard lock(mutex_);
    check_stopped();
    due_.splice(due_.end(), due);
  }
  changed_.notify_one();
  worker_.wake();
}

void Completions::run(const std::stop_token& stop) {
  std::vector<Pushed> awaited;
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !due_.empty(); }), !stop.stop_requested()) {
    awaited.clear();
    for (const Due& due : due_) awaited.push_back(due.pushed);
    lock.unlock();
    std::optional<size_t> here;
    std::optional<Error> error;
    try {
      here = worker_.wait_any(awaited);
    } catch (const Error& caught) {
      error = caught;
    } catch (const std::exception& caught) {
      error.emplace(ErrorCode::kInternal, caught.what());
    }
    std::list<Due> finished;
    lock.lock();
    if (error) {
      finished.swap(due_);
    } else if (here) {
      finished.splice(finished.end(), due_, std::next(due_.begin(), static_cast<long>(*here)));
    }
    lock.unlock();
    finish(finished, error ? &*error : nullptr);
    lock.lock();
  }
  std::list<Due> rest;
  rest.swap(due_);
  lock.unlock();
  const Error ended(ErrorCode::kFenced, "the worker was destroyed before the result was here");
  finish(rest, &ended);
}

void Completions::finish(const std::list<Due>& due, const Error* error) {
  for (const Due& one : due) {
    calling_back = true;
    one.callback(one.pushed, error);
    calling_back = false;
  }
}

}  // namespace phub
