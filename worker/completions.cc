#include "worker/completions.h"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "worker/any_error.h"

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
  if (!thread_.joinable()) return;
  worker_.end("the worker was destroyed before the result was here");
  thread_.join();
}

void Completions::push(size_t key, int32_t priority, Callback callback) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) fail(ErrorCode::kFenced, "the worker is being destroyed");
    if (!thread_.joinable()) {
      thread_ = start_thread("phub-complete", [this](const std::stop_token&) { run(); });
    }
  }
  // The worker owns it from the push until wait_any() returns it.
  auto due = std::make_unique<Callback>(std::move(callback));
  worker_.push(key, {.priority = priority, .announced = true, .tag = due.get()});
  std::ignore = due.release();
}

void Completions::run() {
  for (;;) {
    std::optional<Completion> one;
    try {
      one = worker_.wait_any();
    } catch (const Error&) {
      return;  // the worker has failed, and no push is left
    }
    if (!one || one->tag == nullptr) continue;  // woken, or not a push of this class
    if (one->saver_error) fmt::print(stderr, "phub: {}\n", one->saver_error->what());
    const std::unique_ptr<Callback> due(static_cast<Callback*>(one->tag));
    calling_back = true;
    try {
      (*due)(one->pushed, one->error ? &*one->error : nullptr);
    } catch (...) {
      worker_.end("a completion threw an exception");
    }
    calling_back = false;
  }
}

}  // namespace phub
