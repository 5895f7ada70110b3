// Counts what the server's core threads ask of the allocator: the C functions, and with them the
// operators new and delete and everything that libraries do, and mappings of memory. A program that
// links allocation_trap.cc has its own malloc for it; where sanitizers have theirs, their hooks
// count, and mappings are not seen.
#pragma once

#include <cstdint>

namespace phub::testing {

// One at a time.
class AllocationTrap {
 public:
  // From here on, calls of threads that are named phub-core-* are counted.
  AllocationTrap();
  ~AllocationTrap() { disarm(); }
  AllocationTrap(const AllocationTrap&) = delete;
  AllocationTrap& operator=(const AllocationTrap&) = delete;

  void disarm();
  uint64_t calls() const;
  static constexpr bool sees_mappings() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
  }
};

}  // namespace phub::testing
