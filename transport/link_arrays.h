// A worker's gradients and results, as a link over a NIC has them: in memory of the host, in that
// of a device, which NICs read and write themselves, or in another link's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "numa/memory.h"
#include "transport/memory_device.h"
#include "transport/transport.h"
#include "transport/worker_memory.h"

namespace phub {

// REQUIRES: they outlive registrations of their memory.
class LinkArrays {
 public:
  // Memory of the host, whose pages prefer `os_node`. Throws Error(kFull).
  LinkArrays(uint32_t os_node, uint64_t gradients_bytes, uint64_t results_bytes);
  // Throws Error(kFull). REQUIRES: `device` outlives this.
  LinkArrays(MemoryDevice& device, uint64_t gradients_bytes, uint64_t results_bytes);
  // Another link's memory of the host, which outlives this.
  LinkArrays(std::span<std::byte> gradients, std::span<std::byte> results)
      : gradients_(gradients), results_(results), readable_(results) {}
  ~LinkArrays();
  LinkArrays(const LinkArrays&) = delete;
  LinkArrays& operator=(const LinkArrays&) = delete;

  bool are_anothers() const { return device_ == nullptr && own_gradients_.bytes().empty(); }
  MemoryDevice* device() const { return device_; }  // null: they are memory of the host
  int cuda_ordinal() const { return device_ == nullptr ? -1 : device_->cuda_ordinal(); }
  bool in_host_memory() const { return cuda_ordinal() < 0; }
  std::span<std::byte> gradients() const { return gradients_; }
  std::span<std::byte> writable_results() const { return results_; }
  std::span<const std::byte> results() const { return readable_; }  // the same, for the application
  // Copies from the host into the gradients, from byte `offset` on.
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) const;

 private:
  MemoryDevice* const device_ = nullptr;
  numa::Memory own_gradients_;  // the next two: where this has memory of the host
  ResultMemory own_results_;
  std::span<std::byte> gradients_, results_;
  std::span<const std::byte> readable_;
};

// With the sizes of the layout, at a worker. Returns null if there is no device.
std::unique_ptr<LinkArrays> arrays_on(MemoryDevice* device, const LinkLayout& layout);
std::unique_ptr<LinkArrays> arrays_in(uint32_t os_node, const LinkLayout& layout);  // on the host

}  // namespace phub
