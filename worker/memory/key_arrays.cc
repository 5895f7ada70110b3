#include "worker/memory/key_arrays.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/error.h"

namespace phub {

KeyArrays::KeyArrays(std::span<const size_t> elements) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (const size_t count : elements) {
    offsets.push_back(bytes);
    bytes += (count * sizeof(float) + page - 1) / page * page;
  }
  if (bytes == 0) {
    keys_.resize(elements.size());
    return;
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    fail(ErrorCode::kFull, "mmap of {} bytes for {} keys: {}", bytes, elements.size(),
         std::strerror(errno));
  }
  data_ = std::unique_ptr<void, Unmap>(data, Unmap{bytes});
  madvise(data, bytes, MADV_HUGEPAGE);  // a hint, which kernels may be built without
  for (size_t key = 0; key < elements.size(); ++key) {
    std::byte* at = static_cast<std::byte*>(data) + offsets[key];
    keys_.emplace_back(reinterpret_cast<float*>(at), elements[key]);
  }
}

void KeyArrays::Unmap::operator()(void* data) const { munmap(data, bytes); }

}  // namespace phub
