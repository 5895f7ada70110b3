#include "worker/geeps/key_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub::geeps {

KeyMemory::KeyMemory(std::span<const size_t> elements) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<size_t> offsets;
  for (const size_t count : elements) {
    offsets.push_back(bytes_);
    bytes_ += (count * sizeof(float) + page - 1) / page * page;
  }
  if (bytes_ == 0) return;
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    fail(ErrorCode::kFull, "mmap of {} bytes for {} keys: {}", bytes_, elements.size(),
         std::strerror(errno));
  }
  data_ = data;
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint, which kernels may be built without
  for (size_t key = 0; key < elements.size(); ++key) {
    std::byte* at = static_cast<std::byte*>(data_) + offsets[key];
    keys_.emplace_back(reinterpret_cast<float*>(at), elements[key]);
  }
}

KeyMemory::KeyMemory(KeyMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      keys_(std::move(other.keys_)) {}

KeyMemory& KeyMemory::operator=(KeyMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(keys_, other.keys_);
  return *this;
}

KeyMemory::~KeyMemory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace phub::geeps
