// The announced pushes of a worker: those in progress, and those that have ended, in the order of
// their end. Every operation takes O(1), but for the ones that end many pushes.
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

  // Adds a push in progress, of a key or of one part. REQUIRES: none of this key and part is, and
  // no earlier push has a later deadline.
  void expect(const Pushed& pushed, void* tag, Time deadline);
  // Ends the push of the key or part, if it was announced, since its result is here.
  void arrived(size_t key, size_t part = 0);
  void expire(Time now);  // ends the pushes whose deadline has passed
  void fail_all();
  // Drops all pushes, in progress or ended. Their results are not reported.
  void forget();

  size_t expected() const { return expected_.size(); }
  size_t ended() const { return ended_.size(); }

  struct Ended {
    Pushed pushed;
    void* tag;
    End end;
  };
  Ended pop();  // the one that ended first. REQUIRES: ended() > 0

 private:
  struct Entry {
    Ended what;
    Time deadline;
  };
  using Entries = std::list<Entry>;
  void end(Entries::iterator entry, End how);

  Entries expected_;  // in the order of the pushes, which is that of their deadlines
  Entries ended_;
  using At = std::optional<Entries::iterator>;
  At& at(const Pushed& pushed);

  std::vector<std::vector<At>> at_;  // by key and part: its entry in expected_
};

}  // namespace phub
