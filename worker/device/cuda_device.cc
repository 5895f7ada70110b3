#include "worker/device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>

#include "transport/error.h"
#include "worker/device/cuda_stream.h"
#include "worker/device/poison.h"

namespace phub {
namespace {

std::string text_of(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorString(error), cudaGetErrorName(error));
}

// For set-up: nothing of it breaks a stream.
void must(cudaError_t result, ErrorCode code, std::string_view what) {
  if (result != cudaSuccess) {
    cudaGetLastError();  // so that the next launch does not report it
    fail(code, "{}: {}", what, text_of(result));
  }
}

class CudaDevice : public Device {
 public:
  CudaDevice(const CudaDeviceOptions& options, const std::string& name)
      : Device(name, options.budget_bytes), state_(name, options.ordinal) {
    use();
    if (options.budget_bytes > 0) {
      must(cudaMalloc(&memory_, options.budget_bytes), ErrorCode::kFull,
           fmt::format("{}: a budget of {} bytes", name, options.budget_bytes));
    }
    set_memory(memory_);
  }
  ~CudaDevice() override {
    cudaSetDevice(state_.ordinal());
    cudaFree(memory_);
  }

  std::unique_ptr<Stream> make_stream(std::string name) override {
    return std::make_unique<CudaStream>(*this, state_, name);
  }
  std::unique_ptr<Event> make_event() override {
    return std::make_unique<CudaEvent>(*this, state_);
  }

 private:
  void use() { must(cudaSetDevice(state_.ordinal()), ErrorCode::kUnavailable, name()); }
  cudaError_t poison_all(void* memory, size_t bytes) {
    const cudaError_t result = cudaMemset(memory, kPoison, bytes);
    // The streams do not wait for the one that cudaMemset is on.
    return result == cudaSuccess ? cudaStreamSynchronize(nullptr) : result;
  }
  void copy_now(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    use();
    must(cudaMemcpy(to, from, bytes, kind), ErrorCode::kInternal, name());
    must(cudaStreamSynchronize(nullptr), ErrorCode::kInternal, name());
  }

  void do_allocated(void* memory, size_t bytes) override {
    use();
    must(poison_all(memory, bytes), ErrorCode::kInternal, name());
  }
  // Destructors release, so nothing of that throws: what has failed is reported by the streams.
  void do_released(void* memory, size_t bytes) override {
    cudaSetDevice(state_.ordinal());
    poison_all(memory, bytes);
    cudaGetLastError();
  }
  void* do_allocate_host(size_t bytes) override {
    use();
    void* memory = nullptr;
    must(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), ErrorCode::kFull, "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    return memory;
  }
  void do_release_host(void* memory, size_t /*bytes*/) override {
    cudaSetDevice(state_.ordinal());
    cudaFreeHost(memory);
    cudaGetLastError();
  }
  void do_pin_host(void* memory, size_t bytes) override {
    use();
    cudaError_t result = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
    if (result == cudaErrorInvalidValue || result == cudaErrorNotSupported) {
      // Memory that is mapped for reading only, if the device can do that.
      cudaGetLastError();
      result = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterReadOnly);
    }
    must(result, ErrorCode::kFull,
         fmt::format("{}: cudaHostRegister of {} bytes at {}", name(), bytes, memory));
  }
  void do_unpin_host(void* memory) override {
    use();
    must(cudaHostUnregister(memory), ErrorCode::kInternal, name());
  }
  void do_write(void* to, const void* from, size_t bytes) override {
    copy_now(to, from, bytes, cudaMemcpyHostToDevice);
  }
  void do_read(void* to, const void* from, size_t bytes) override {
    copy_now(to, from, bytes, cudaMemcpyDeviceToHost);
  }

  CudaState state_;
  void* memory_ = nullptr;
};

}  // namespace

CudaDevices cuda_devices() {
  CudaDevices found;
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    cudaGetLastError();
    found.none_because =
        result == cudaSuccess
            ? "the CUDA driver knows no device; see nvidia-smi and CUDA_VISIBLE_DEVICES"
            : fmt::format("{}; install NVIDIA's driver, see nvidia-smi", text_of(result));
    return found;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    CudaDeviceInfo info;
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess ||
        cudaSetDevice(ordinal) != cudaSuccess ||
        cudaMemGetInfo(&info.free_bytes, &info.memory_bytes) != cudaSuccess) {
      found.none_because = fmt::format("CUDA device {}: {}", ordinal, text_of(cudaGetLastError()));
      continue;
    }
    info.ordinal = ordinal;
    info.name = properties.name;
    info.copy_engines = properties.asyncEngineCount;
    found.devices.push_back(info);
  }
  if (!found.devices.empty()) found.none_because.clear();
  return found;
}

std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& options) {
  const CudaDevices found = cuda_devices();
  for (const CudaDeviceInfo& info : found.devices) {
    if (info.ordinal != options.ordinal) continue;
    return std::make_unique<CudaDevice>(options,
                                        fmt::format("cuda {} ({})", info.ordinal, info.name));
  }
  fail(ErrorCode::kUnavailable, "there is no CUDA device {}: {}", options.ordinal,
       found.devices.empty() ? found.none_because
                             : fmt::format("there are {}", found.devices.size()));
}

}  // namespace phub
