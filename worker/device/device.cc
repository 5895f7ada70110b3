#include "worker/device/device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub {

void* Device::allocate(size_t bytes, std::string_view what) {
  if (bytes == 0) return nullptr;
  std::byte* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto offset = arena_.allocate(bytes);
    if (!offset) {
      fail(ErrorCode::kFull,
           "{}: {} bytes for '{}' exceed the budget: {} of {} bytes are in use, the largest free "
           "part "
           "has {}; raise the budget or allocate less",
           name_, bytes, what, arena_.used(), budget_, arena_.largest_free());
    }
    peak_ = std::max(peak_, arena_.used());
    memory = memory_ + *offset;
  }
  try {
    do_allocated(memory, bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    arena_.release(static_cast<size_t>(memory - memory_));
    throw;
  }
  return memory;
}

void Device::release(void* memory) {
  if (memory == nullptr) return;
  const auto* begin = static_cast<std::byte*>(memory);
  const auto offset = reinterpret_cast<uintptr_t>(begin) - reinterpret_cast<uintptr_t>(memory_);
  const std::lock_guard lock(mutex_);
  if (offset >= arena_.size()) {
    fail(ErrorCode::kInvalid, "{}: release of {}, which is not memory of this device", name_,
         memory);
  }
  const auto bytes = arena_.release(offset);
  if (!bytes) {
    fail(ErrorCode::kInvalid,
         "{}: release of {}, which is released already or not the beginning of an allocation",
         name_, memory);
  }
  do_released(memory, *bytes);
}

void* Device::allocate_host(size_t bytes, std::string_view what) {
  if (bytes == 0) return nullptr;
  try {
    void* memory = do_allocate_host(bytes);
    const std::lock_guard lock(mutex_);
    host_.emplace(static_cast<std::byte*>(memory), HostRange{bytes, true, HostUse::kReadWrite});
    host_bytes_ += bytes;
    return memory;
  } catch (const std::exception& e) {
    fail(ErrorCode::kFull, "{}: {} bytes of pinned host memory for '{}': {}", name_, bytes, what,
         e.what());
  }
}

void Device::release_host(void* memory) {
  if (memory == nullptr) return;
  do_release_host(memory, take_host_range(memory, true).bytes);
}

void Device::pin_host(const void* memory, size_t bytes, HostUse use, std::string_view what) {
  if (bytes == 0) return;
  const auto* begin = static_cast<const std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  const auto after = host_.lower_bound(begin + bytes);
  if (after != host_.begin()) {
    const auto& [other, range] = *std::prev(after);
    if (other + range.bytes > begin) {
      fail(ErrorCode::kInvalid, "{}: pinning {} bytes at {} for '{}': pinned already", name_, bytes,
           memory, what);
    }
  }
  const auto added = host_.emplace(begin, HostRange{bytes, false, use}).first;
  try {
    do_pin_host(memory, bytes, use, what);
  } catch (...) {
    host_.erase(added);
    throw;
  }
  host_bytes_ += bytes;
}

void Device::unpin_host(const void* memory) {
  if (memory == nullptr) return;
  take_host_range(memory, false);
  do_unpin_host(memory);
}

Device::HostRange Device::take_host_range(const void* memory, bool ours) {
  const std::lock_guard lock(mutex_);
  const auto found = host_.find(static_cast<const std::byte*>(memory));
  if (found == host_.end() || found->second.ours != ours) {
    fail(ErrorCode::kInvalid, "{}: {} of {}, which is not what {} was given", name_,
         ours ? "release_host" : "unpin_host", memory, ours ? "allocate_host" : "pin_host");
  }
  const HostRange range = found->second;
  host_.erase(found);
  host_bytes_ -= range.bytes;
  return range;
}

void Device::write(void* to, const void* from, size_t bytes) {
  check_device("write to", to, bytes);
  if (bytes > 0) do_write(to, from, bytes);
}

void Device::read(void* to, const void* from, size_t bytes) {
  check_device("read from", from, bytes);
  if (bytes > 0) do_read(to, from, bytes);
}

DmaBuf Device::dma_buf(const void* /*memory*/, size_t /*bytes*/) const {
  fail(ErrorCode::kInvalid, "{}: its memory is no DMA buffer", name_);
}

std::unique_ptr<Signals> Device::make_signals(size_t /*count*/) {
  fail(ErrorCode::kUnavailable, "{}: this device has no signals", name_);
}

std::unique_ptr<Stream> Device::adopt_stream(void* /*stream*/, std::string /*name*/) {
  fail(ErrorCode::kUnavailable, "{}: this device takes no streams of others", name_);
}

bool Device::holds(const void* memory, size_t bytes) const {
  const auto offset = reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(memory_);
  if (offset < budget_) {
    const std::lock_guard lock(mutex_);
    return arena_.holds(offset, bytes);
  }
  return memory != nullptr && holds_of_others(memory, bytes);
}

void Device::check_device(const char* what, const void* memory, size_t bytes) const {
  if (bytes == 0 || holds(memory, bytes)) return;
  fail(ErrorCode::kInvalid,
       "{}: {} {} bytes at {}, which are not inside one allocation of this device", name_, what,
       bytes, memory);
}

void Device::check_host(const char* what, const void* memory, size_t bytes, HostUse use) const {
  const auto* begin = static_cast<const std::byte*>(memory);
  {
    const std::lock_guard lock(mutex_);
    const auto after = host_.upper_bound(begin);
    if (after != host_.begin()) {
      const auto& [held, range] = *std::prev(after);
      const auto offset = static_cast<size_t>(begin - held);
      if (offset <= range.bytes && bytes <= range.bytes - offset) {
        if (use == HostUse::kRead || range.use == HostUse::kReadWrite) return;
        fail(ErrorCode::kInvalid,
             "{}: {} {} bytes of host memory at {}, which is pinned for "
             "reading only",
             name_, what, bytes, memory);
      }
    }
  }
  fail(ErrorCode::kInvalid,
       "{}: {} {} bytes of host memory at {}, which are not pinned: use allocate_host or pin_host",
       name_, what, bytes, memory);
}

DeviceStats Device::stats() const {
  DeviceStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats.used_bytes = arena_.used();
    stats.peak_bytes = peak_;
    stats.host_bytes = host_bytes_;
  }
  stats.budget_bytes = budget_;
  stats.bytes_to_device = bytes_to_device_;
  stats.bytes_to_host = bytes_to_host_;
  stats.copies = copies_;
  stats.kernels = kernels_;
  return stats;
}

DeviceMemory::DeviceMemory(Device& device, size_t bytes, std::string_view what)
    : device_(&device), data_(device.allocate(bytes, what)), bytes_(bytes) {}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) device_->release(data_);
}

HostMemory::HostMemory(Device& device, size_t bytes, std::string_view what)
    : device_(&device), data_(device.allocate_host(bytes, what)), bytes_(bytes) {}

HostMemory::HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) device_->release_host(data_);
}

PinnedMemory::PinnedMemory(Device& device, const void* memory, size_t bytes, HostUse use,
                           std::string_view what)
    : device_(&device), memory_(memory) {
  device.pin_host(memory, bytes, use, what);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  return *this;
}

PinnedMemory::~PinnedMemory() {
  if (memory_ != nullptr) device_->unpin_host(memory_);
}

RowIndex::RowIndex(Device& device, std::span<const uint32_t> rows)
    : RowIndex(DeviceMemory(device, rows.size_bytes(), "index"), device, rows) {}

RowIndex::RowIndex(DeviceMemory memory, Device& device, std::span<const uint32_t> rows)
    : RowIndex(device, memory.data(), rows) {
  memory_ = std::move(memory);
}

RowIndex::RowIndex(Device& device, void* place, std::span<const uint32_t> rows)
    : data_(static_cast<uint32_t*>(place)), size_(rows.size()) {
  device.write(place, rows.data(), rows.size_bytes());
  std::vector<uint32_t> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end());
  distinct_ = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (!sorted.empty()) table_rows_ = size_t{sorted.back()} + 1;
}

}  // namespace phub
