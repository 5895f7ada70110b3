// Streams and events of a CUDA device.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "worker/device/device.h"
#include "worker/device/failure.h"

struct CUevent_st;  // a type of the CUDA runtime, whose headers not every machine has
struct CUstream_st;

namespace phub {

// A function of the driver as it is since this version of CUDA; null if the driver is older.
void* cuda_driver_function(const char* name, unsigned since);

// Makes a device the calling thread's current one until the end of the scope; then restores the
// application's.
class CudaCurrent {
 public:
  explicit CudaCurrent(int ordinal);
  CudaCurrent(CudaCurrent&& other) noexcept;
  CudaCurrent& operator=(CudaCurrent&&) = delete;
  ~CudaCurrent();
  int result() const { return result_; }  // a cudaError_t

 private:
  int before_ = -1;  // the device to restore; -1: none
  int result_ = 0;
};

// The failure of a device, which all its streams share: CUDA does not tell which work of which
// stream failed, and accepts no more work of any stream.
class CudaState {
 public:
  CudaState(std::string device, int ordinal) : device_(std::move(device)), ordinal_(ordinal) {}

  // Makes the device current while the returned object lives. Throws if the device has failed.
  [[nodiscard]] CudaCurrent enter(std::string_view stream) const;
  // Throws if `result`, the cudaError_t of `call` on `stream`, is an error.
  void check(int result, const char* call, std::string_view stream) const;
  int ordinal() const { return ordinal_; }

 private:
  std::string device_;
  int ordinal_;
  mutable std::mutex mutex_;  // guards the next one
  mutable std::shared_ptr<Failure> failure_;
};

class CudaEvent : public Event {
 public:
  CudaEvent(Device& device, const CudaState& state);
  ~CudaEvent() override;
  bool done() const override;
  void wait() const override;
  CUevent_st* handle() const { return event_; }

 private:
  const CudaState& state_;
  CUevent_st* event_ = nullptr;
};

class CudaStream : public Stream {
 public:
  CudaStream(Device& device, const CudaState& state, const std::string& name);
  // Uses a stream of the application, which destroys it.
  CudaStream(Device& device, const CudaState& state, const std::string& name, CUstream_st* stream)
      : Stream(device, name), state_(state), stream_(stream), is_ours_(false) {}
  ~CudaStream() override;
  CUstream_st* handle() const { return stream_; }

 private:
  void do_copy_to_device(void* to, const void* from, size_t bytes) override;
  void do_copy_to_host(void* to, const void* from, size_t bytes) override;
  void do_launch(const Kernel& kernel) override;
  void do_call(std::function<void()> callback) override;
  void do_work_for(std::chrono::nanoseconds time) override;
  void do_record(Event& event) override;
  void do_wait(const Event& event) override;
  void do_synchronize() override;
  void do_wait_for(const uint32_t* word, uint32_t number) override;

  const CudaState& state_;
  CUstream_st* stream_ = nullptr;
  bool is_ours_ = true;
};

// Streams wait for words in pinned memory of the host.
class CudaSignals : public Signals {
 public:
  // Throws Error(kUnavailable) if the driver cannot do that.
  CudaSignals(Device& device, size_t count);

 private:
  void do_raised() override {}
};

}  // namespace phub
