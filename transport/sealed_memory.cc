#include "transport/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace phub {

SealedMemory SealedMemory::create(const char* name, uint64_t bytes, MemoryAccess own,
                                  bool peers_write) {
  const auto what = [&](const char* call) {
    return fmt::format("{} of {} ({} bytes)", call, name, bytes);
  };
  SealedMemory memory;
  memory.fd_ = Fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_) fail_system(what("memfd_create"), errno);
  if (bytes > kMaxSealedBytes) {
    fail(ErrorCode::kFull, "{}: at most {} bytes", what("memfd_create"), kMaxSealedBytes);
  }
  const FileSizeErrors no_signal;
  if (ftruncate(memory.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    fail_system(what("ftruncate"), errno);
  }
  memory.map(name, memory.fd_.get(), bytes, own);

  // F_SEAL_FUTURE_WRITE leaves alone the writable mapping that is there already: ours.
  int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (!peers_write) seals |= F_SEAL_FUTURE_WRITE;
  if (fcntl(memory.fd_.get(), F_ADD_SEALS, seals) != 0 ||
      fcntl(memory.fd_.get(), F_ADD_SEALS, F_SEAL_SEAL) != 0) {
    fail_system(what("fcntl(F_ADD_SEALS; needs Linux 5.1)"), errno);
  }
  return memory;
}

SealedMemory SealedMemory::adopt(const char* name, const Fd& fd, uint64_t bytes, MemoryAccess own) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    fail(ErrorCode::kMismatch, "{}: the file is not sealed against shrinking and growing", name);
  }
  struct stat status = {};
  if (fstat(fd.get(), &status) != 0) fail_system(fmt::format("fstat of {}", name), errno);
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    fail(ErrorCode::kMismatch, "{}: the file has {} bytes, not {}", name, status.st_size, bytes);
  }
  SealedMemory memory;
  memory.map(name, fd.get(), bytes, own);
  return memory;
}

void SealedMemory::map(const char* name, int fd, uint64_t bytes, MemoryAccess own) {
  const int protection = own == MemoryAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_system(fmt::format("mmap of {} ({} bytes)", name, bytes), errno);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  madvise(data_, size_, MADV_HUGEPAGE);  // a hint; the kernel's setting for shared memory decides
}

SealedMemory::SealedMemory(SealedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SealedMemory& SealedMemory::operator=(SealedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, size_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

SealedMemory::~SealedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t round_up_to_page(uint64_t bytes) {
  const uint64_t page = page_bytes();
  return (bytes + page - 1) / page * page;
}

}  // namespace phub
