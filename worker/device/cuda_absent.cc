// What is built in place of the CUDA device where there is no CUDA compiler.
#include "transport/error.h"
#include "worker/device/cuda_device.h"

namespace phub {
namespace {

constexpr const char* kAbsent =
    "this build has no CUDA device: install CUDA's nvcc and configure again, or use the host "
    "device";

}  // namespace

CudaDevices cuda_devices() { return {{}, kAbsent}; }

std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& /*options*/) {
  fail(ErrorCode::kUnavailable, "{}", kAbsent);
}

}  // namespace phub
