#include "tests/worker/failing_allocation.h"

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<bool> armed{false};
std::atomic<uint64_t> left{0};  // calls until the one that fails

enum class Watched : signed char { kUnknown, kNo, kYes };
thread_local Watched watched = Watched::kUnknown;

// Asks for the thread's name at its first call while armed.
bool is_watched() {
  if (watched == Watched::kUnknown) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    watched = Watched::kNo;
    for (const char* server : {"phub-core-", "phub-background", "phub-builder", "phub-writer"}) {
      if (std::strncmp(name, server, std::strlen(server)) == 0) watched = Watched::kYes;
    }
  }
  return watched == Watched::kYes;
}

void* allocate(size_t bytes, size_t alignment) {
  if (armed.load(std::memory_order_relaxed) && is_watched() && left.load() > 0 &&
      left.fetch_sub(1) == 1) {
    throw std::bad_alloc();
  }
  void* memory = nullptr;
  if (alignment <= alignof(std::max_align_t)) {
    memory = std::malloc(bytes > 0 ? bytes : 1);
  } else if (posix_memalign(&memory, alignment, bytes) != 0) {
    memory = nullptr;
  }
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* allocate_or_null(size_t bytes, size_t alignment) noexcept {
  try {
    return allocate(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, 0); }
void* operator new[](size_t bytes) { return allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes, 0);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes, 0);
}
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace phub::testing {

void FailingAllocation::watch_this_thread() { watched = Watched::kYes; }

FailingAllocation::FailingAllocation(uint64_t nth) {
  left = nth;
  armed = true;
}

void FailingAllocation::disarm() { armed = false; }

bool FailingAllocation::has_failed() const { return left == 0; }

}  // namespace phub::testing
