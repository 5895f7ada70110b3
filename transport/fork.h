// A worker's process may fork children that know nothing of phub (data loaders). They must not hold
// its connections open when it is dead: the end of a connection is how a box learns of that.
#pragma once

#include <utility>

namespace phub {

// While it lives, a child that this process forks gets /dev/null in place of `fd`: its number stays
// taken there, so that what closes it twice closes nothing of somebody else's. What that child puts
// in its place is that child's own.
class ClosedOnFork {
 public:
  ClosedOnFork() = default;
  explicit ClosedOnFork(int fd);
  ClosedOnFork(ClosedOnFork&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ClosedOnFork& operator=(ClosedOnFork&& other) noexcept;
  ~ClosedOnFork();

 private:
  int fd_ = -1;
};

}  // namespace phub
