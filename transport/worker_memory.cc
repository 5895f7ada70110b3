#include "transport/worker_memory.h"

#include <sys/mman.h>

#include <deque>
#include <mutex>

#include "numa/memory.h"

namespace phub {

ResultMemory::ResultMemory(uint64_t bytes, uint32_t os_node, bool shared)
    : writable_(SealedMemory::create("phub-received", bytes, MemoryAccess::kReadWrite, true)),
      readable_(SealedMemory::adopt("phub-received", writable_.fd(), bytes, MemoryAccess::kRead)) {
  if (!shared) writable_.close_fd();
  numa::prefer_node(writable_.bytes(), os_node);
}

void ResultMemory::bury() noexcept {
  if (!readable_.bytes().empty()) phub::bury(std::move(readable_));
  writable_ = SealedMemory();
}

namespace internal {
namespace {

constexpr size_t kKept = 1000;

}  // namespace

void make_inaccessible(std::span<const std::byte> memory) noexcept {
  if (memory.empty()) return;
  void* const at = const_cast<std::byte*>(memory.data());
  // If the kernel refuses, the memory stays as it is: there is no one to report it to.
  [[maybe_unused]] const void* const gone =
      mmap(at, round_up_to_page(memory.size()), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void keep(std::shared_ptr<const void> mapping) {
  static auto& mutex = *new std::mutex;  // never destroyed: workers may outlive main()
  static auto& kept = *new std::deque<std::shared_ptr<const void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(mapping));
  if (kept.size() > kKept) kept.pop_front();
}

}  // namespace internal
}  // namespace phub
