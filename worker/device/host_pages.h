// Host memory that is registered with a driver, so that devices copy it directly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

namespace phub {

// The ways in which copies use host memory.
enum class HostUse : bool { kRead, kReadWrite };

size_t host_page_bytes();

// Whole pages, which copies use in one way.
struct PageRange {
  uintptr_t begin, end;
  HostUse use;
};
PageRange pages_of(std::span<const std::byte> memory, HostUse use);
// Ranges that share pages become one range, which is written if a part of it is. Ranges that only
// touch stay apart: they may be mapped differently, and a driver registers one kind at a time.
std::vector<PageRange> merged(std::vector<PageRange> ranges);

// The registrations of a process with one driver. A driver registers whole pages, each once for all
// devices, and read-only pages only if it is told so. Devices that pin the same pages share a
// registration, which ends with the last of them. Thread-safe.
class HostPages {
 public:
  HostPages() = default;
  virtual ~HostPages() = default;
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  // Pins the pages of this range. Throws Error: kInvalid, some of them are registered as part of
  // another range, or for reading only; kFull, the driver refuses.
  void pin(const void* memory, size_t bytes, HostUse use, std::string_view what);
  // REQUIRES: the range was pinned, at least as often as it is unpinned.
  void unpin(const void* memory) noexcept;

 private:
  struct Registration {
    uintptr_t end = 0;
    HostUse use = HostUse::kRead;
    uint32_t users = 0;
  };

  // REQUIRES: whole pages. Throws Error(kFull) with the driver's message and the way out.
  virtual void do_register(void* begin, size_t bytes, HostUse use, std::string_view what) = 0;
  virtual void do_unregister(void* begin) noexcept = 0;

  std::mutex mutex_;                         // guards the members below, and calls of the driver
  std::map<uintptr_t, Registration> pages_;  // by start address
};

}  // namespace phub
