#include "transport/link_arrays.h"

#include <cstring>

namespace phub {

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
}

LinkArrays::~LinkArrays() {
  if (device_ == nullptr) return;
  device_->release(gradients_.data());
  device_->release(results_.data());
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

}  // namespace phub
