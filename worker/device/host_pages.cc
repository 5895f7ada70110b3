#include "worker/device/host_pages.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "transport/error.h"

namespace phub {
namespace {

uintptr_t begin_of(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) / host_page_bytes() * host_page_bytes();
}
uintptr_t end_of(const void* memory, size_t bytes) {
  const uintptr_t last = reinterpret_cast<uintptr_t>(memory) + bytes - 1;
  return (last / host_page_bytes() + 1) * host_page_bytes();
}

}  // namespace

size_t host_page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

PageRange pages_of(std::span<const std::byte> memory, HostUse use) {
  return {begin_of(memory.data()), end_of(memory.data(), memory.size()), use};
}

std::vector<PageRange> merged(std::vector<PageRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const PageRange& a, const PageRange& b) { return a.begin < b.begin; });
  std::vector<PageRange> merged;
  for (const PageRange& range : ranges) {
    if (merged.empty() || range.begin >= merged.back().end) {
      merged.push_back(range);
      continue;
    }
    merged.back().end = std::max(merged.back().end, range.end);
    if (range.use == HostUse::kReadWrite) merged.back().use = range.use;
  }
  return merged;
}

void HostPages::pin(const void* memory, size_t bytes, HostUse use, std::string_view what) {
  const uintptr_t begin = begin_of(memory);
  const uintptr_t end = end_of(memory, bytes);
  const std::lock_guard lock(mutex_);
  const auto after = pages_.lower_bound(end);
  if (after != pages_.begin() && std::prev(after)->second.end > begin) {
    auto& [other, registered] = *std::prev(after);
    if (other != begin || registered.end != end) {
      fail(ErrorCode::kInvalid,
           "pinning {} bytes at {} for '{}': of their pages some are pinned together with others, "
           "from {:#x} to {:#x}; pin the same ranges on every device",
           bytes, memory, what, other, registered.end);
    }
    if (use == HostUse::kReadWrite && registered.use == HostUse::kRead) {
      fail(ErrorCode::kInvalid, "pinning {} bytes at {} for '{}': they are pinned for reading only",
           bytes, memory, what);
    }
    ++registered.users;
    return;
  }
  const auto added = pages_.emplace(begin, Registration{end, use, 1}).first;
  try {
    do_register(reinterpret_cast<void*>(begin), end - begin, use, what);
  } catch (...) {
    pages_.erase(added);
    throw;
  }
}

void HostPages::unpin(const void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = pages_.find(begin_of(memory));
  PHUB_CHECK(found != pages_.end());
  if (--found->second.users > 0) return;
  do_unregister(reinterpret_cast<void*>(found->first));
  pages_.erase(found);
}

}  // namespace phub
