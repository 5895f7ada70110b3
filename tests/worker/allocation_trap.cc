#include "tests/worker/allocation_trap.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<bool> armed{false};
std::atomic<uint64_t> calls{0};

// Asks for the thread's name once: it is asked for at the thread's first call while armed.
bool is_core_thread() {
  static thread_local signed char known = -1;
  if (known < 0) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    known = std::strncmp(name, "phub-core-", 10) == 0 ? 1 : 0;
  }
  return known == 1;
}

void count() {
  if (armed.load(std::memory_order_relaxed) && is_core_thread()) {
    calls.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

// Of sanitizer/allocator_interface.h, which not every compiler comes with.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));

namespace {
[[maybe_unused]] const int hooks = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, size_t) { count(); }, [](const volatile void*) { count(); });
}  // namespace

#else

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);

void* malloc(size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  count();
  return __libc_calloc(n, bytes);
}
void* realloc(void* memory, size_t bytes) {
  count();
  return __libc_realloc(memory, bytes);
}
void free(void* memory) {
  if (memory != nullptr) count();
  __libc_free(memory);
}
void* memalign(size_t alignment, size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** out, size_t alignment, size_t bytes) {
  count();
  void* memory = __libc_memalign(alignment, bytes);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  count();
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
}
void* mmap64(void* at, size_t bytes, int protection, int flags, int fd, off64_t offset) {
  return mmap(at, bytes, protection, flags, fd, offset);
}
int munmap(void* at, size_t bytes) {
  count();
  return static_cast<int>(syscall(SYS_munmap, at, bytes));
}
void* mremap(void* at, size_t bytes, size_t wanted, int flags, ...) {
  count();
  va_list arguments;
  va_start(arguments, flags);
  void* target = (flags & MREMAP_FIXED) != 0 ? va_arg(arguments, void*) : nullptr;
  va_end(arguments);
  return reinterpret_cast<void*>(syscall(SYS_mremap, at, bytes, wanted, flags, target));
}
}

#endif

namespace phub::testing {

AllocationTrap::AllocationTrap() {
  ::calls = 0;
  ::armed = true;
}

void AllocationTrap::disarm() { ::armed = false; }

uint64_t AllocationTrap::calls() const { return ::calls; }

}  // namespace phub::testing
