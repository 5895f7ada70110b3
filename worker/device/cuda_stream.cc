#include "worker/device/cuda_stream.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "transport/error.h"
#include "worker/device/cuda_kernels.h"

namespace phub {

void* cuda_driver_function(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const bool there = cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault,
                                                      &result) == cudaSuccess &&
                     result == cudaDriverEntryPointSuccess;
  if (!there) cudaGetLastError();
  return there ? found : nullptr;
}

namespace {

// Whether the application uses the device: to make it current would make it so, which takes memory
// of it. If the driver does not say, no.
bool in_use(int ordinal) {
  using Answer = int(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  constexpr unsigned kSince = 7000;                              // CUDA 7.0
  static auto* const ask =
      reinterpret_cast<Answer*>(cuda_driver_function("cuDevicePrimaryCtxGetState", kSince));
  unsigned flags = 0;
  int active = 0;
  return ask != nullptr && ask(ordinal, &flags, &active) == 0 && active != 0;
}

// Its results are numbers that cudaError_t has, too.
using WaitValue = int(CUstream_st* stream, unsigned long long address, uint32_t value,  // NOLINT
                      unsigned flags);
WaitValue* wait_value() {
  constexpr unsigned kSince = 12000;  // CUDA 12.0, from which on every GPU can
  static auto* const found =
      reinterpret_cast<WaitValue*>(cuda_driver_function("cuStreamWaitValue32", kSince));
  return found;
}

}  // namespace

CudaCurrent::CudaCurrent(int ordinal) {
  int before = -1;
  result_ = cudaGetDevice(&before);
  if (result_ != cudaSuccess || before == ordinal) return;
  result_ = cudaSetDevice(ordinal);
  if (result_ == cudaSuccess && in_use(before)) before_ = before;
}

CudaCurrent::CudaCurrent(CudaCurrent&& other) noexcept
    : before_(std::exchange(other.before_, -1)), result_(other.result_) {}

CudaCurrent::~CudaCurrent() {
  if (before_ >= 0) cudaSetDevice(before_);
}

CudaCurrent CudaState::enter(std::string_view stream) const {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) failure_->raise(device_, stream);
  }
  CudaCurrent current(ordinal_);
  check(current.result(), "cudaSetDevice", stream);
  return current;
}

void CudaState::check(int result, const char* call, std::string_view stream) const {
  const auto error = static_cast<cudaError_t>(result);
  if (error == cudaSuccess) return;
  std::shared_ptr<Failure> failure;
  {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) {
      failure_ = std::make_shared<Failure>(fmt::format("stream '{}': {} met {}: {}", stream, call,
                                                       cudaGetErrorName(error),
                                                       cudaGetErrorString(error)));
    }
    failure = failure_;
  }
  failure->raise(device_, stream);
}

CudaEvent::CudaEvent(Device& device, const CudaState& state) : Event(device), state_(state) {
  const CudaCurrent current = state_.enter("");
  state_.check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
               "cudaEventCreateWithFlags", "");
}

CudaEvent::~CudaEvent() { cudaEventDestroy(event_); }

bool CudaEvent::done() const {
  const CudaCurrent current = state_.enter("");
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  state_.check(result, "cudaEventQuery", "");
  return true;
}

void CudaEvent::wait() const {
  const CudaCurrent current = state_.enter("");
  state_.check(cudaEventSynchronize(event_), "cudaEventSynchronize", "");
}

CudaStream::CudaStream(Device& device, const CudaState& state, const std::string& name)
    : Stream(device, name), state_(state) {
  const CudaCurrent current = state_.enter(name);
  state_.check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags", name);
}

CudaStream::~CudaStream() {
  if (!is_ours_) return;
  const CudaCurrent current(state_.ordinal());
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void CudaStream::do_copy_to_device(void* to, const void* from, size_t bytes) {
  const CudaCurrent current = state_.enter(name());
  state_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync to the device", name());
}

void CudaStream::do_copy_to_host(void* to, const void* from, size_t bytes) {
  const CudaCurrent current = state_.enter(name());
  state_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync to the host", name());
}

void CudaStream::do_launch(const Kernel& kernel) {
  const CudaCurrent current = state_.enter(name());
  if (kernel.kind == Kernel::Kind::kCopy) {
    state_.check(
        cudaMemcpyAsync(kernel.to, kernel.from, kernel.count, cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpyAsync on the device", name());
  } else {
    state_.check(launch_on_cuda(kernel, stream_), "start of a kernel", name());
  }
}

void CudaStream::do_call(std::function<void()> callback) {
  const CudaCurrent current = state_.enter(name());
  auto held = std::make_unique<std::function<void()>>(std::move(callback));
  const auto call = [](void* data) noexcept {
    const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
    (*mine)();
  };
  state_.check(cudaLaunchHostFunc(stream_, call, held.get()), "cudaLaunchHostFunc", name());
  (void)held.release();
}

void CudaStream::do_work_for(std::chrono::nanoseconds time) {
  const CudaCurrent current = state_.enter(name());
  state_.check(launch_sleep(static_cast<uint64_t>(time.count()), stream_), "start of a kernel",
               name());
}

void CudaStream::do_record(Event& event) {
  const CudaCurrent current = state_.enter(name());
  state_.check(cudaEventRecord(static_cast<CudaEvent&>(event).handle(), stream_), "cudaEventRecord",
               name());
}

void CudaStream::do_wait(const Event& event) {
  const CudaCurrent current = state_.enter(name());
  state_.check(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).handle()),
               "cudaStreamWaitEvent", name());
}

// By an event, whose wait sleeps: cudaStreamSynchronize may spin.
void CudaStream::do_synchronize() {
  CudaEvent reached(device(), state_);
  do_record(reached);
  reached.wait();
}

// Pinned memory has one address for host and device.
void CudaStream::do_wait_for(const uint32_t* word, uint32_t number) {
  constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ, which counts modulo 2^32
  const CudaCurrent current = state_.enter(name());
  state_.check(wait_value()(stream_, reinterpret_cast<uintptr_t>(word), number, kAtLeast),
               "cuStreamWaitValue32", name());
}

CudaSignals::CudaSignals(Device& device, size_t count) : Signals(device, count) {
  if (wait_value() != nullptr) return;
  phub::fail(
      ErrorCode::kUnavailable,
      "{}: its streams cannot wait for the host: the driver has no cuStreamWaitValue32; install "
      "the driver of CUDA 12 or later",
      device.name());
}

}  // namespace phub
