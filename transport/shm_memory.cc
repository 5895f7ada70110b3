#include "transport/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "transport/error.h"
#include "transport/shm_format.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace phub {
namespace {

std::string limit_of(int resource) {
  rlimit limit = {};
  getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

ShmFd& ShmFd::operator=(ShmFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void ShmFd::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void fail_system(std::string_view what, int error) {
  const std::string reason = std::strerror(error);
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ETOOMANYREFS:
      fail(ErrorCode::kFull,
           "{}: {}; the limit of open files is {}, raise it with LimitNOFILE or ulimit -n", what,
           reason, limit_of(RLIMIT_NOFILE));
    case ENOMEM:
    case ENOSPC:
      fail(ErrorCode::kFull,
           "{}: {}; the address space limit is {} (ulimit -v), mappings are limited to {} "
           "(vm.max_map_count), epoll watches to {} (fs.epoll.max_user_watches); raise what is "
           "short, or give the job less memory",
           what, reason, limit_of(RLIMIT_AS), first_line("/proc/sys/vm/max_map_count"),
           first_line("/proc/sys/fs/epoll/max_user_watches"));
    default:
      fail(ErrorCode::kInternal, "{}: {}", what, reason);
  }
}

ShmMemory ShmMemory::create(const char* name, uint64_t bytes, ShmAccess own, bool peers_write) {
  const auto what = [&](const char* call) {
    return fmt::format("{} of {} ({} bytes)", call, name, bytes);
  };
  ShmMemory memory;
  memory.fd_ = ShmFd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_) fail_system(what("memfd_create"), errno);
  if (bytes > kShmMaxFileBytes) {
    fail(ErrorCode::kFull, "{}: at most {} bytes", what("memfd_create"), kShmMaxFileBytes);
  }
  // A size beyond what off_t or the file system takes is a lack of memory like any other.
  if (ftruncate(memory.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    fail_system(what("ftruncate"), errno == EFBIG || errno == EINVAL ? ENOMEM : errno);
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

ShmMemory ShmMemory::adopt(const char* name, const ShmFd& fd, uint64_t bytes, ShmAccess own) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    fail(ErrorCode::kMismatch, "{}: the server's file is not sealed against shrinking and growing",
         name);
  }
  struct stat status = {};
  if (fstat(fd.get(), &status) != 0) fail_system(fmt::format("fstat of {}", name), errno);
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    fail(ErrorCode::kMismatch, "{}: the server's file has {} bytes, it announced {}", name,
         status.st_size, bytes);
  }
  ShmMemory memory;
  memory.map(name, fd.get(), bytes, own);
  return memory;
}

void ShmMemory::map(const char* name, int fd, uint64_t bytes, ShmAccess own) {
  const int protection = own == ShmAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_system(fmt::format("mmap of {} ({} bytes)", name, bytes), errno);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
  madvise(data_, size_, MADV_HUGEPAGE);  // a hint; the kernel's setting for shared memory decides
}

ShmMemory::ShmMemory(ShmMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

ShmMemory& ShmMemory::operator=(ShmMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, size_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

ShmMemory::~ShmMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

uint64_t shm_page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t round_up_to_page(uint64_t bytes) {
  const uint64_t page = shm_page_bytes();
  return (bytes + page - 1) / page * page;
}

std::string describe_shm_pages() {
  constexpr const char* kSetting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  const std::string line = first_line(kSetting);
  for (const char* word : {"[always]", "[within_size]", "[advise]", "[force]"}) {
    if (line.find(word) != std::string::npos) return "huge pages";
  }
  return fmt::format("{}-byte pages (huge ones: echo advise > {})", shm_page_bytes(), kSetting);
}

void raise_file_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace phub
