// Work on device memory in the order of the application: on its compute stream, or, where it
// computes in its own thread, here and now.
#pragma once

#include <cstddef>
#include <memory>

#include "worker/device/device.h"

namespace phub::geeps {

class DeviceWork {
 public:
  // Without a stream the calls are done when they return.
  DeviceWork(Device& device, Stream* compute);

  bool in_stream() const { return stream_ != nullptr; }
  Stream* stream() { return stream_; }

  void copy(float* to, const float* from, size_t floats);
  void add(float* to, const float* from, size_t floats, float factor = 1);
  void fill(float* to, float value, size_t floats);
  // Between `from` or `to`, rows in order, and the rows of a buffer that an index names.
  void scatter(const float* from, const RowIndex& index, Rows to);
  void gather(ConstRows from, const RowIndex& index, float* to);
  void gather_add(ConstRows from, const RowIndex& index, float* to);

  // What is enqueued or computed from here on comes after the event; the caller's thread waits
  // only if it is what computes.
  void wait(const Event& event);
  // The work so far. Without a stream it is done already.
  void record(Event& event);

  // Of rows that were copied or added while the caller's thread did nothing else.
  uint64_t caller_bytes() const { return caller_bytes_; }

 private:
  template <class Enqueue>
  void run(const Kernel& kernel, Enqueue enqueue);

  bool here_;                    // computed in this thread
  std::unique_ptr<Stream> own_;  // of a device that this thread cannot compute on
  Stream* stream_ = nullptr;     // the application's
  uint64_t caller_bytes_ = 0;
};

}  // namespace phub::geeps
