// Memory of the host that is registered with a driver, so that devices copy it without a detour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>

namespace phub {

// What copies do with memory of the host.
enum class HostUse : bool { kRead, kReadWrite };

size_t host_page_bytes();

// The registrations of a process with one driver, which knows whole pages, takes each of them once
// whatever device asks, and takes pages that are mapped for reading only if it is told so. Devices
// that pin the same pages share a registration: it ends with the last of them. Thread-safe.
class HostPages {
 public:
  HostPages() = default;
  virtual ~HostPages() = default;
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  // The pages of this range. Throws Error: kInvalid, some of them are registered with other pages,
  // or for reading only; kFull, the driver refuses.
  void pin(const void* memory, size_t bytes, HostUse use, std::string_view what);
  // REQUIRES: these were pinned, and as often as they are unpinned.
  void unpin(const void* memory) noexcept;

 private:
  struct Registration {
    uintptr_t end = 0;
    HostUse use = HostUse::kRead;
    uint32_t users = 0;
  };

  // Whole pages. Throws Error(kFull) with what the driver said and what to do.
  virtual void do_register(void* begin, size_t bytes, HostUse use, std::string_view what) = 0;
  virtual void do_unregister(void* begin) noexcept = 0;

  std::mutex mutex_;                         // guards what follows, and calls of the driver
  std::map<uintptr_t, Registration> pages_;  // by their beginning
};

}  // namespace phub
