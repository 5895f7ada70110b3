// Sealed memory files that two processes map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/fd.h"

namespace phub {

inline constexpr uint64_t kMaxSealedBytes = 1ull << 48;  // the most bytes of one file

enum class MemoryAccess { kRead, kReadWrite };

// A memfd of fixed size and a mapping of all of it. Moving it keeps the mapping where it is.
class SealedMemory {
 public:
  SealedMemory() = default;
  // Makes the file, zeroed and untouched, and maps it with `own` access. Its size is sealed for
  // good, and so is the set of seals; without `peers_write` nobody can write it or map it writable
  // any more, through any descriptor, but for the mapping made here.
  static SealedMemory create(const char* name, uint64_t bytes, MemoryAccess own, bool peers_write);
  // Maps a file that came from the other side. It must have exactly `bytes` and be sealed against
  // shrinking (a shrunk mapping is a SIGBUS) and growing; throws Error(kMismatch) otherwise.
  static SealedMemory adopt(const char* name, const Fd& fd, uint64_t bytes, MemoryAccess own);

  SealedMemory(SealedMemory&& other) noexcept;
  SealedMemory& operator=(SealedMemory&& other) noexcept;
  ~SealedMemory();

  std::span<std::byte> bytes() const { return {data_, size_}; }
  const Fd& fd() const { return fd_; }
  void close_fd() { fd_.reset(); }  // the mapping stays

 private:
  void map(const char* name, int fd, uint64_t bytes, MemoryAccess own);

  Fd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

uint64_t page_bytes();
uint64_t round_up_to_page(uint64_t bytes);

}  // namespace phub
