// Descriptors and sealed memory files that two processes map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace phub {

// Owns a file descriptor.
class ShmFd {
 public:
  ShmFd() = default;
  explicit ShmFd(int fd) : fd_(fd) {}
  ShmFd(ShmFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ShmFd& operator=(ShmFd&& other) noexcept;
  ~ShmFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Throws Error for a system call that failed with errno `error`: kFull for what runs out (with the
// limit and how to raise it), kInternal for the rest. `what` names the call and the object.
[[noreturn]] void fail_system(std::string_view what, int error);

enum class ShmAccess { kRead, kReadWrite };

// A memfd of fixed size and a mapping of all of it. Moving it keeps the mapping where it is.
class ShmMemory {
 public:
  ShmMemory() = default;
  // Makes the file, zeroed and untouched, and maps it with `own` access. Its size is sealed for
  // good, and so is the set of seals; without `peers_write` nobody can write it or map it writable
  // any more, through any descriptor, but for the mapping made here.
  static ShmMemory create(const char* name, uint64_t bytes, ShmAccess own, bool peers_write);
  // Maps a file that came from the other side. It must have exactly `bytes` and be sealed against
  // shrinking (a shrunk mapping is a SIGBUS) and growing; throws Error(kMismatch) otherwise.
  static ShmMemory adopt(const char* name, const ShmFd& fd, uint64_t bytes, ShmAccess own);

  ShmMemory(ShmMemory&& other) noexcept;
  ShmMemory& operator=(ShmMemory&& other) noexcept;
  ~ShmMemory();

  std::span<std::byte> bytes() const { return {data_, size_}; }
  const ShmFd& fd() const { return fd_; }
  void close_fd() { fd_.reset(); }  // the mapping stays

 private:
  void map(const char* name, int fd, uint64_t bytes, ShmAccess own);

  ShmFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

uint64_t shm_page_bytes();
uint64_t round_up_to_page(uint64_t bytes);

// "huge pages", or why not.
std::string describe_shm_pages();

// Raises the soft limit of open files to the hard one.
void raise_file_limit();

}  // namespace phub
