// A worker's gradients and results where they are not a link's own: in memory of a device, which
// NICs read and write themselves, or in that of another link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/memory_device.h"
#include "transport/transport.h"

namespace phub {

// They outlive what is registered of them.
class LinkArrays {
 public:
  // Throws Error(kFull). REQUIRES: `device` outlives this.
  LinkArrays(MemoryDevice& device, uint64_t gradients_bytes, uint64_t results_bytes);
  // Memory of the host, which outlives this.
  LinkArrays(std::span<std::byte> gradients, std::span<std::byte> results)
      : gradients_(gradients), results_(results) {}
  ~LinkArrays();
  LinkArrays(const LinkArrays&) = delete;
  LinkArrays& operator=(const LinkArrays&) = delete;

  MemoryDevice* device() const { return device_; }  // null: they are memory of the host
  int cuda_ordinal() const { return device_ == nullptr ? -1 : device_->cuda_ordinal(); }
  bool in_host_memory() const { return cuda_ordinal() < 0; }
  std::span<std::byte> gradients() const { return gradients_; }
  std::span<std::byte> results() const { return results_; }
  // Copies from the host into the gradients, from byte `offset` on.
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) const;

 private:
  MemoryDevice* const device_ = nullptr;
  std::span<std::byte> gradients_, results_;
};

// Of the sizes that the layout of a worker has. Null: there is no device.
std::unique_ptr<LinkArrays> arrays_on(MemoryDevice* device, const LinkLayout& layout);

}  // namespace phub
