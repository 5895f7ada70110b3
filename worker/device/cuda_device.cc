#include "worker/device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>

#include "transport/error.h"
#include "worker/device/cuda_kernels.h"
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

// One for all devices: what is registered is for all of them. REQUIRES of pin(): a device is
// current.
class CudaPages final : public HostPages {
 public:
  // Devices may still be there when static objects go.
  static CudaPages& instance() {
    static auto& pages = *new CudaPages;
    return pages;
  }

 private:
  void do_register(void* begin, size_t bytes, HostUse use, std::string_view what) override {
    int ordinal = 0;
    int reads_only = 0;  // the device can use pages that it must not write
    must(cudaGetDevice(&ordinal), ErrorCode::kUnavailable, "cudaGetDevice");
    must(cudaDeviceGetAttribute(&reads_only, cudaDevAttrHostRegisterReadOnlySupported, ordinal),
         ErrorCode::kUnavailable, "cudaDeviceGetAttribute");
    const bool as_read_only = use == HostUse::kRead && reads_only != 0;
    const cudaError_t result = cudaHostRegister(
        begin, bytes, cudaHostRegisterPortable | (as_read_only ? cudaHostRegisterReadOnly : 0u));
    must(result, ErrorCode::kFull,
         fmt::format("cudaHostRegister of {} bytes at {} for '{}'{}", bytes, begin, what,
                     use == HostUse::kRead && !as_read_only
                         ? " (this device takes only memory that may be written: with shared "
                           "memory of the box it cannot; choose another transport)"
                         : ""));
  }
  void do_unregister(void* begin) noexcept override {
    cudaHostUnregister(begin);  // destructors call it: an error cannot be reported
    cudaGetLastError();
  }
};

int attribute_of(int ordinal, cudaDeviceAttr attribute) {
  int value = 0;
  must(cudaDeviceGetAttribute(&value, attribute, ordinal), ErrorCode::kUnavailable,
       "cudaDeviceGetAttribute");
  return value;
}

class CudaDevice : public Device {
 public:
  CudaDevice(const CudaDeviceOptions& options, const std::string& name)
      : Device(name, options.budget_bytes), state_(name, options.ordinal) {
    const CudaCurrent current = use();
    if (options.budget_bytes > 0) {
      must(cudaMalloc(&memory_, whole_pages(options.budget_bytes)), ErrorCode::kFull,
           fmt::format("{}: a budget of {} bytes", name, options.budget_bytes));
    }
    set_memory(memory_);
    const CudaStream loading(*this, state_, "loading");
    must(static_cast<cudaError_t>(load_on_cuda(loading.handle())), ErrorCode::kUnavailable,
         fmt::format("{}: its kernels", name));
    must(cudaStreamSynchronize(loading.handle()), ErrorCode::kUnavailable, name);
  }
  ~CudaDevice() override {
    const CudaCurrent current(state_.ordinal());
    cudaFree(memory_);
  }

  std::unique_ptr<Stream> make_stream(std::string name) override {
    return std::make_unique<CudaStream>(*this, state_, name);
  }
  std::unique_ptr<Event> make_event() override {
    return std::make_unique<CudaEvent>(*this, state_);
  }
  std::unique_ptr<Signals> make_signals(size_t count) override {
    return std::make_unique<CudaSignals>(*this, count);
  }
  std::unique_ptr<Stream> adopt_stream(void* stream, std::string name) override {
    return std::make_unique<CudaStream>(*this, state_, name, static_cast<CUstream_st*>(stream));
  }

  // To choose the largest elements to the same bits is left to the host.
  int cuda_ordinal() const override { return state_.ordinal(); }
  DmaBuf dma_buf(const void* memory, size_t bytes) const override;
  void flush_nic_writes() override;

 private:
  static size_t whole_pages(size_t bytes) {
    static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
  }
  CudaCurrent use() const {
    CudaCurrent current(state_.ordinal());
    must(static_cast<cudaError_t>(current.result()), ErrorCode::kUnavailable, name());
    return current;
  }
  cudaError_t poison_all(void* memory, size_t bytes) {
    const cudaError_t result = cudaMemset(memory, kPoison, bytes);
    // The streams do not wait for the one that cudaMemset is on.
    return result == cudaSuccess ? cudaStreamSynchronize(nullptr) : result;
  }
  void copy_now(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const CudaCurrent current = use();
    must(cudaMemcpy(to, from, bytes, kind), ErrorCode::kInternal, name());
    must(cudaStreamSynchronize(nullptr), ErrorCode::kInternal, name());
  }

  // Looks at both ends: CUDA does not say which allocation they are in.
  bool holds_of_others(const void* memory, size_t bytes) const override {
    const CudaCurrent current(state_.ordinal());
    const auto is_here = [this](const void* at) {
      cudaPointerAttributes found{};
      if (cudaPointerGetAttributes(&found, at) != cudaSuccess) {
        cudaGetLastError();
        return false;
      }
      return (found.type == cudaMemoryTypeDevice && found.device == state_.ordinal()) ||
             found.type == cudaMemoryTypeManaged;
    };
    return is_here(memory) && is_here(static_cast<const std::byte*>(memory) + bytes - 1);
  }
  void do_allocated(void* memory, size_t bytes) override {
    const CudaCurrent current = use();
    must(poison_all(memory, bytes), ErrorCode::kInternal, name());
  }
  // Destructors release, so nothing of that throws: what has failed is reported by the streams.
  void do_released(void* memory, size_t bytes) override {
    const CudaCurrent current(state_.ordinal());
    poison_all(memory, bytes);
    cudaGetLastError();
  }
  void* do_allocate_host(size_t bytes) override {
    const CudaCurrent current = use();
    void* memory = nullptr;
    must(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), ErrorCode::kFull, "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    return memory;
  }
  void do_release_host(void* memory, size_t /*bytes*/) override {
    const CudaCurrent current(state_.ordinal());
    cudaFreeHost(memory);
    cudaGetLastError();
  }
  void do_pin_host(const void* memory, size_t bytes, HostUse use, std::string_view what) override {
    const CudaCurrent current(state_.ordinal());
    CudaPages::instance().pin(memory, bytes, use, what);
  }
  void do_unpin_host(const void* memory) noexcept override {
    const CudaCurrent current(state_.ordinal());
    CudaPages::instance().unpin(memory);
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

// The driver hands out whole pages of the host's size. A kernel that reads what the host has
// written synchronously must find it, also if a NIC reads the same memory (CUDA's "GPUDirect RDMA",
// "Synchronization and Memory Ordering").
DmaBuf CudaDevice::dma_buf(const void* memory, size_t bytes) const {
  using GetHandle = int(void* handle, unsigned long long address, size_t size,             // NOLINT
                        int type, unsigned long long flags);                               // NOLINT
  using SetAttribute = int(const void* value, int attribute, unsigned long long address);  // NOLINT
  constexpr int kDmaBufFd = 1;        // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
  constexpr int kSyncMemOps = 6;      // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
  constexpr unsigned kSince = 11070;  // CUDA 11.7
  const CudaCurrent current = use();
  const auto get_handle =
      reinterpret_cast<GetHandle*>(cuda_driver_function("cuMemGetHandleForAddressRange", kSince));
  const auto set_attribute =
      reinterpret_cast<SetAttribute*>(cuda_driver_function("cuPointerSetAttribute", 6000));
  if (get_handle == nullptr || set_attribute == nullptr) {
    fail(ErrorCode::kInvalid,
         "{}: the driver has no cuMemGetHandleForAddressRange: install that of CUDA 11.7 or later, "
         "with the open kernel modules, or leave memory_device out",
         name());
  }
  if (attribute_of(state_.ordinal(), cudaDevAttrGPUDirectRDMASupported) == 0) {
    fail(ErrorCode::kInvalid, "{}: this GPU has no GPUDirect RDMA: leave memory_device out",
         name());
  }
  const auto base = reinterpret_cast<uintptr_t>(memory_);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = base + (begin - base) / whole_pages(1) * whole_pages(1);
  const size_t all = whole_pages(begin + bytes - first);
  const unsigned on = 1;
  int fd = -1;
  int error = set_attribute(&on, kSyncMemOps, first);
  if (error == 0) error = get_handle(&fd, first, all, kDmaBufFd, 0);
  if (error != 0) {
    fail(ErrorCode::kInvalid,
         "{}: cuMemGetHandleForAddressRange of {} bytes: {}; DMA buffers need NVIDIA's open kernel "
         "modules and Linux 5.12: install them, or leave memory_device out",
         name(), all, text_of(static_cast<cudaError_t>(error)));
  }
  return {Fd(fd), begin - first};
}

// GPUs since Hopper, and others by their setting, need no flush.
void CudaDevice::flush_nic_writes() {
  const CudaCurrent current = use();
  if (attribute_of(state_.ordinal(), cudaDevAttrGPUDirectRDMAWritesOrdering) >=
      cudaGPUDirectRDMAWritesOrderingOwner) {
    return;
  }
  must(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                          cudaFlushGPUDirectRDMAWritesToOwner),
       ErrorCode::kInternal, fmt::format("{}: cudaDeviceFlushGPUDirectRDMAWrites", name()));
}

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
    const CudaCurrent current(ordinal);
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess ||
        current.result() != cudaSuccess ||
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

// Asks for this one alone: to ask a device how much it has free takes some of it.
std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& options) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) count = 0;
  if (options.ordinal < 0 || options.ordinal >= count) {
    cudaGetLastError();
    fail(ErrorCode::kUnavailable, "there is no CUDA device {}: {}", options.ordinal,
         count == 0 ? cuda_devices().none_because : fmt::format("there are {}", count));
  }
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, options.ordinal), ErrorCode::kUnavailable,
       fmt::format("CUDA device {}", options.ordinal));
  return std::make_unique<CudaDevice>(
      options, fmt::format("cuda {} ({})", options.ordinal, properties.name));
}

}  // namespace phub
