// The threads of a process wait here for each other: the last one to come does the work, and then
// all go on. A failure is one for all of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/error.h"

namespace phub::iterstore {

class Meeting {
 public:
  explicit Meeting(uint32_t threads) : present_(threads, false), gone_(threads, false) {}

  // Throws Error(kInvalid) if the thread is there already.
  void enter(uint32_t thread);
  void leave(uint32_t thread);
  bool is_empty() const;

  // `what` names the call for the message if threads meet in different calls; null accepts any call
  // of the others. If `work` throws, all threads throw the same, now and ever after.
  void meet(const char* what, const std::function<void()>& work);
  // Does the work of one thread, for which others need not wait; no two such works run at once.
  void alone(const std::function<void()>& work);

 private:
  void run(const std::function<void()>& work);
  void fail_with(const Error& error);
  void check() const;

  mutable std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<bool> present_, gone_;
  const char* what_ = nullptr;
  uint32_t here_ = 0;
  uint64_t meetings_ = 0;
  std::optional<Error> failure_;
};

}  // namespace phub::iterstore
