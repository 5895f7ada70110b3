// The threads of a process wait here for each other: the last one to come does the work, of which
// it may deal out pieces to those that wait, and then all go on. A failure is one for all of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
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
  bool has_failed() const;

  // `what` names the call for the message if threads meet in different calls; null accepts any call
  // of the others. If `work` throws, all threads throw the same, now and ever after.
  void meet(const char* what, const std::function<void()>& work);
  // Calls piece(0) to piece(pieces − 1), each once, and returns when all have returned. All threads
  // that have met take them, in this order. Throws the error of a piece; then some were not called.
  // REQUIRES: called by the `work` of meet().
  void share(size_t pieces, const std::function<void(size_t)>& piece);
  // Does the work of one thread, for which others need not wait; no two such works run at once.
  void alone(const std::function<void()>& work);

 private:
  void run(const std::function<void()>& work);
  void take_pieces(std::unique_lock<std::mutex>& lock);
  void fail_with(const Error& error);
  void check() const;

  mutable std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<bool> present_, gone_;
  const char* what_ = nullptr;
  uint32_t here_ = 0;
  uint64_t meetings_ = 0;
  std::optional<Error> failure_;
  const std::function<void(size_t)>* piece_ = nullptr;  // what is shared now; null: nothing
  size_t pieces_ = 0;
  std::atomic<size_t> next_piece_ = 0;
  uint32_t takers_ = 0;  // waiting threads that take pieces
  std::condition_variable all_taken_;
};

}  // namespace phub::iterstore
