// The announced pushes of a worker: those whose end is still to come, and those that have ended,
// in the order in which they did. Every step is O(1), however many there are.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "worker/worker.h"

namespace phub {

// Not thread-safe.
class CompletionQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class End { kHere, kLate, kFailed };

  explicit CompletionQueue(size_t keys) : at_(keys) {}

  // REQUIRES: no push of this key is expected, and no deadline is before an earlier push's.
  void expect(const Pushed& pushed, void* tag, Time deadline);
  // The key's result is here; nothing if its push was not announced.
  void arrived(size_t key);
  // Ends those whose deadline is over, or all that are left.
  void expire(Time now);
  void fail_all();
  // Drops all of them, whatever their end: a result that comes later is nobody's.
  void forget();

  size_t expected() const { return expected_.size(); }
  size_t ended() const { return ended_.size(); }

  struct Ended {
    Pushed pushed;
    void* tag;
    End end;
  };
  Ended take();  // REQUIRES: ended() > 0

 private:
  struct Entry {
    Ended what;
    Time deadline;
  };
  using Entries = std::list<Entry>;
  void end(Entries::iterator entry, End how);

  Entries expected_;  // in the order of the pushes, and so of the deadlines
  Entries ended_;
  std::vector<std::optional<Entries::iterator>> at_;  // by key, in expected_
};

}  // namespace phub
