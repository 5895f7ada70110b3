#include "transport/device_arrays.h"

namespace phub {

DeviceArrays::DeviceArrays(MemoryDevice& device, uint64_t gradients_bytes, uint64_t results_bytes)
    : device_(device),
      gradients_(
          static_cast<std::byte*>(device.allocate(gradients_bytes, "gradients that the NIC reads")),
          gradients_bytes) {
  try {
    results_ = {
        static_cast<std::byte*>(device.allocate(results_bytes, "results that the NIC writes")),
        results_bytes};
  } catch (...) {
    device_.release(gradients_.data());
    throw;
  }
}

DeviceArrays::~DeviceArrays() {
  device_.release(gradients_.data());
  device_.release(results_.data());
}

std::unique_ptr<DeviceArrays> arrays_on(MemoryDevice* device, const LinkLayout& layout) {
  if (device == nullptr) return nullptr;
  return std::make_unique<DeviceArrays>(*device, layout.gradients_at_worker(),
                                        layout.results_at_worker());
}

}  // namespace phub
