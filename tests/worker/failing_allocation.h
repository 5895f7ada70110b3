// Lets one allocation of the server's threads fail: the n-th call of operator new while armed
// throws std::bad_alloc. A program that links failing_allocation.cc has operators new and delete of
// its own; they call malloc and free, which sanitizers know. C libraries' own calls of malloc do
// not fail.
#pragma once

#include <cstdint>

namespace phub::testing {

// One at a time.
class FailingAllocation {
 public:
  // The calls of this thread count, beside those of threads with names of a server's.
  static void watch_this_thread();

  explicit FailingAllocation(uint64_t nth);  // from 1
  ~FailingAllocation() { disarm(); }
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  void disarm();
  bool has_failed() const;  // there were n calls
};

}  // namespace phub::testing
