// File descriptors, and failed system calls as Errors.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace phub {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  int release() { return std::exchange(fd_, -1); }  // it is the caller's now

 private:
  int fd_ = -1;
};

// A worker's process may fork children that know nothing of phub (data loaders). They must not keep
// its connections open after its death, because the box learns of that from their end.
//
// As long as this object lives, a child that this process forks has /dev/null in place of `fd`. The
// number stays in use there, so that a child that closes it closes nothing else. A file that the
// child opens under that number later is its own.
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

// Throws Error for a system call that failed with errno `error`: kFull for a resource that runs out
// (with the limit and how to raise it), kInternal for the rest. `what` names the call and the
// object.
[[noreturn]] void fail_system(std::string_view what, int error);

// While one lives, a file that this thread would grow beyond the limit of a file's size (ulimit -f)
// is the error EFBIG for it. Without one the kernel sends SIGXFSZ, which ends the process unless
// the program ignores it, as ours do; this is for the library, in a program that is not ours.
class FileSizeErrors {
 public:
  FileSizeErrors();
  ~FileSizeErrors();
  FileSizeErrors(const FileSizeErrors&) = delete;
  FileSizeErrors& operator=(const FileSizeErrors&) = delete;

 private:
  bool blocked_ = false;  // by this object
};

// Raises the soft limit of open files to the hard one.
void raise_file_limit();

}  // namespace phub
