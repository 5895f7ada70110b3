#include "worker/device/cuda_stream.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "worker/device/cuda_kernels.h"

namespace phub {

void CudaState::enter(std::string_view stream) const {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) failure_->raise(device_, stream);
  }
  check(cudaSetDevice(ordinal_), "cudaSetDevice", stream);
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
  state_.enter("");
  state_.check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
               "cudaEventCreateWithFlags", "");
}

CudaEvent::~CudaEvent() { cudaEventDestroy(event_); }

bool CudaEvent::done() const {
  state_.enter("");
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  state_.check(result, "cudaEventQuery", "");
  return true;
}

void CudaEvent::wait() const {
  state_.enter("");
  state_.check(cudaEventSynchronize(event_), "cudaEventSynchronize", "");
}

CudaStream::CudaStream(Device& device, const CudaState& state, const std::string& name)
    : Stream(device, name), state_(state) {
  state_.enter(name);
  state_.check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags", name);
}

CudaStream::~CudaStream() {
  cudaSetDevice(state_.ordinal());
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void CudaStream::do_copy_to_device(void* to, const void* from, size_t bytes) {
  state_.enter(name());
  state_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync to the device", name());
}

void CudaStream::do_copy_to_host(void* to, const void* from, size_t bytes) {
  state_.enter(name());
  state_.check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync to the host", name());
}

void CudaStream::do_launch(const Kernel& kernel) {
  state_.enter(name());
  if (kernel.kind == Kernel::Kind::kCopy) {
    state_.check(
        cudaMemcpyAsync(kernel.to, kernel.from, kernel.count, cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpyAsync on the device", name());
  } else {
    state_.check(launch_on_cuda(kernel, stream_), "start of a kernel", name());
  }
}

void CudaStream::do_call(std::function<void()> callback) {
  state_.enter(name());
  auto held = std::make_unique<std::function<void()>>(std::move(callback));
  const auto call = [](void* data) noexcept {
    const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
    (*mine)();
  };
  state_.check(cudaLaunchHostFunc(stream_, call, held.get()), "cudaLaunchHostFunc", name());
  (void)held.release();
}

void CudaStream::do_work_for(std::chrono::nanoseconds time) {
  state_.enter(name());
  state_.check(launch_sleep(static_cast<uint64_t>(time.count()), stream_), "start of a kernel",
               name());
}

void CudaStream::do_record(Event& event) {
  state_.enter(name());
  state_.check(cudaEventRecord(static_cast<CudaEvent&>(event).handle(), stream_), "cudaEventRecord",
               name());
}

void CudaStream::do_wait(const Event& event) {
  state_.enter(name());
  state_.check(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).handle()),
               "cudaStreamWaitEvent", name());
}

// By an event, whose wait sleeps: cudaStreamSynchronize may spin.
void CudaStream::do_synchronize() {
  CudaEvent reached(device(), state_);
  do_record(reached);
  reached.wait();
}

}  // namespace phub
