#include "transport/link_arrays.h"

#include <cstring>
#include <utility>

#include "transport/box_memory.h"

namespace phub {

LinkArrays::LinkArrays(uint32_t os_node, uint64_t gradients_bytes, uint64_t results_bytes)
    : own_gradients_(allocate(gradients_bytes, os_node, "memory for gradients")),
      own_results_(results_bytes, os_node),
      gradients_(own_gradients_.bytes()),
      results_(own_results_.writable()),
      readable_(own_results_.readable()) {}

LinkArrays::LinkArrays(MemoryDevice& device, uint64_t gradients_bytes, uint64_t results_bytes)
    : device_(&device),
      gradients_(
          static_cast<std::byte*>(device.allocate(gradients_bytes, "gradients that the NIC reads")),
          gradients_bytes) {
  try {
    results_ = {
        static_cast<std::byte*>(device.allocate(results_bytes, "results that the NIC writes")),
        results_bytes};
  } catch (...) {
    device.release(gradients_.data());
    throw;
  }
  readable_ = results_;
}

LinkArrays::~LinkArrays() {
  if (device_ != nullptr) {
    device_->release(gradients_.data());
    device_->release(results_.data());
  }
  if (!own_gradients_.bytes().empty()) bury(std::move(own_gradients_));
  own_results_.bury();
}

void LinkArrays::write_gradients(uint64_t offset, std::span<const std::byte> bytes) const {
  std::byte* const to = gradients_.data() + offset;
  if (device_ != nullptr) return device_->write(to, bytes.data(), bytes.size());
  std::memcpy(to, bytes.data(), bytes.size());
}

std::unique_ptr<LinkArrays> arrays_on(MemoryDevice* device, const LinkLayout& layout) {
  if (device == nullptr) return nullptr;
  return std::make_unique<LinkArrays>(*device, layout.gradients_at_worker(),
                                      layout.results_at_worker());
}

std::unique_ptr<LinkArrays> arrays_in(uint32_t os_node, const LinkLayout& layout) {
  return std::make_unique<LinkArrays>(os_node, layout.gradients_at_worker(),
                                      layout.results_at_worker());
}

}  // namespace phub
