// Stories: functions that wait for something in their middle and go on in the next line (C++20
// coroutines). Control thread only.
//
//   Task<Size> Server::measure(std::string name) {
//     uint64_t bytes = 0;
//     const auto count = [&] { bytes = bytes_of(name); };     // may use the story's variables
//     if (const auto failed = co_await beside(host_.builder, count)) throw Error(*failed);
//     const auto ask = [&](Reply<Size> reply) { parent_.measure(name, std::move(reply)); };
//     co_return bytes + co_await answer_to<Size>(ask);        // throws the Error of the reply
//   }
//   answer(measure(name), reply);                             // runs it, and replies
//
// Order: a story begins in the call that starts it. It goes on inside the call of the function that
// brings the answer, at once: nothing is queued, so a story runs where a lambda would.
//
// Lifetime: that function owns the waiting story, all of its frames and variables. If the function
// is destroyed without a call (the job has ended, the server ends), so is the story. Work beside
// the control thread may therefore use the story's variables. But a story that has a shared_ptr to
// an object and waits for an answer of the same object keeps both alive for ever, unless somebody
// drops the answer.
//
// Errors: a Task that throws an Error fails the co_await of it. Any other exception ends the
// program, as it does elsewhere on the control thread; so does a Story that throws, and an `ask`
// that has answered and then throws.
//
// A coroutine is a function, never a lambda, and takes values: lambdas and references may be gone
// when it goes on. A lambda for co_await has a name, so that it lives in the story.
// (await_suspend() is not inlined: clang below 17 then puts its variables into the frame, which may
// be gone before it returns.)
#pragma once

#include <coroutine>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "phub/background.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

struct StoryFrame {
  std::coroutine_handle<> first;  // the first frame of the story, which owns the others
};

// A story that nobody waits for: it runs until it has to wait, and then by itself.
struct Story {
  struct Promise : StoryFrame {
    Story get_return_object() {
      first = std::coroutine_handle<Promise>::from_promise(*this);
      return {};
    }
    std::suspend_never initial_suspend() const noexcept { return {}; }
    std::suspend_never final_suspend() const noexcept { return {}; }
    void return_void() const {}
    [[noreturn]] void unhandled_exception() const noexcept { std::terminate(); }
  };
  using promise_type = Promise;  // NOLINT(readability-identifier-naming): the language's name
};

// A part of a story. It begins when it is awaited; then co_await returns its T, or throws.
template <typename T>
class [[nodiscard]] Task {
 public:
  struct Promise : StoryFrame {
    struct End : std::suspend_always {
      std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> here) const noexcept {
        return here.promise().awaiting;
      }
    };
    Task get_return_object() { return Task(std::coroutine_handle<Promise>::from_promise(*this)); }
    std::suspend_always initial_suspend() const noexcept { return {}; }
    End final_suspend() const noexcept { return {}; }
    void return_value(T result) { value.emplace(std::move(result)); }
    void unhandled_exception() noexcept {
      try {
        throw;
      } catch (const Error& error) {
        failed = error;
      }  // anything else ends the program
    }
    std::coroutine_handle<> awaiting;
    std::optional<T> value;
    std::optional<Error> failed;
  };
  using promise_type = Promise;  // NOLINT(readability-identifier-naming): the language's name

  Task(Task&& other) noexcept : frame_(std::exchange(other.frame_, nullptr)) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (frame_) frame_.destroy();
  }

  bool await_ready() const noexcept { return false; }
  template <typename Frame>
  std::coroutine_handle<> await_suspend(std::coroutine_handle<Frame> here) noexcept {
    frame_.promise().first = here.promise().first;
    frame_.promise().awaiting = here;
    return frame_;
  }
  T await_resume() {
    Promise& promise = frame_.promise();
    if (promise.failed) throw Error(*promise.failed);
    return std::move(*promise.value);
  }

 private:
  explicit Task(std::coroutine_handle<Promise> frame) : frame_(frame) {}

  std::coroutine_handle<Promise> frame_;
};

// Runs the task, and replies with its result or its error.
template <typename T>
Story answer(Task<T> task, Reply<T> reply) {
  std::optional<Result<T>> result;
  try {
    result = co_await task;
  } catch (const Error& error) {
    result = Result<T>(error.code(), error.what());
  }
  reply(std::move(*result));
}

// A story that waits. One of the copies resumes it, or else the last one destroys it.
class WaitingStory {
 public:
  template <typename Frame>
  explicit WaitingStory(std::coroutine_handle<Frame> here)
      : frames_(std::make_shared<Frames>(here.promise().first, here)) {}
  bool waits() const { return frames_->here != nullptr; }
  // REQUIRES: waits().
  void resume() const { release().resume(); }
  std::coroutine_handle<> release() const {
    PHUB_CHECK(frames_->here);
    return std::exchange(frames_->here, nullptr);
  }

 private:
  struct Frames {
    Frames(std::coroutine_handle<> the_first, std::coroutine_handle<> waiting)
        : first(the_first), here(waiting) {}
    Frames(const Frames&) = delete;
    std::coroutine_handle<> first, here;
    ~Frames() {
      if (here) first.destroy();
    }
  };
  std::shared_ptr<Frames> frames_;
};

// Calls ask(go), and waits until go(answer) is called.
template <typename Answer, typename Ask>
class Awaited : public std::suspend_always {
 public:
  explicit Awaited(Ask ask) : ask_(ask) {}
  template <typename Frame>
  [[gnu::noinline]] void await_suspend(std::coroutine_handle<Frame> here) {
    const WaitingStory story(here);
    try {
      ask_([this, story](Answer answer) {
        if (!story.waits()) return;  // `ask` has kept this, and failed then
        answer_.emplace(std::move(answer));
        story.resume();
      });
    } catch (...) {  // the story goes on here, with this exception
      story.release();
      throw;
    }
  }
  auto await_resume() {
    if constexpr (std::is_same_v<Answer, std::optional<Error>>) {
      return *answer_;
    } else {
      if (!*answer_) throw Error(answer_->code, answer_->message);
      return std::move(*answer_->value);
    }
  }

 private:
  Ask ask_;
  std::optional<Answer> answer_;
};

// Calls ask(reply), with a Reply<T>. co_await returns its T, or throws its Error.
template <typename T, typename Ask>
auto answer_to(Ask& ask) {
  return Awaited<Result<T>, Ask&>(ask);
}
// Calls ask(done); done takes the error, if there is one. co_await returns that.
template <typename Ask>
auto outcome_of(Ask& ask) {
  return Awaited<std::optional<Error>, Ask&>(ask);
}
// Does `work` on that thread. co_await returns its exception as an Error, or nothing.
template <typename Work>
auto beside(Background& thread, Work& work) {
  const auto run = [&](Background::End end) { thread.run(work, std::move(end)); };
  return Awaited<std::optional<Error>, decltype(run)>(run);
}
// The same, with `job.run_beside()`: the job lives until then.
template <typename Job, typename Work>
auto beside(Job& job, Background& thread, Work& work) {
  const auto run = [&](Background::End end) { job.run_beside(thread, work, std::move(end)); };
  return Awaited<std::optional<Error>, decltype(run)>(run);
}

// Something that stories wait for, in the order in which they came.
class Event {
 public:
  auto next() { return Next{{}, waiting_}; }
  void happen() {
    for (const WaitingStory& story : std::exchange(waiting_, {})) story.resume();
  }
  // This story goes on first, until it waits or ends; then those that wait for the event.
  auto happen_after_me() { return AfterMe{{}, waiting_}; }

 private:
  using Stories = std::vector<WaitingStory>;
  struct Next : std::suspend_always {
    Stories& waiting;
    template <typename Frame>
    void await_suspend(std::coroutine_handle<Frame> here) const {
      waiting.emplace_back(here);
    }
  };
  struct AfterMe : std::suspend_always {
    Stories& waiting;
    [[gnu::noinline]] void await_suspend(std::coroutine_handle<> here) const {
      const Stories others = std::exchange(waiting, {});
      here.resume();
      for (const WaitingStory& story : others) story.resume();
    }
  };
  Stories waiting_;
};

}  // namespace phub
