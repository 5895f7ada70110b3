// Work on device memory in the order of the application: on its compute stream or, if it has none,
// in its thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "worker/device/device.h"
#include "worker/geeps/schedule.h"

namespace phub::geeps {

class DeviceWork {
 public:
  // `compute` null: calls have completed when they return.
  DeviceWork(Device& device, Stream* compute);

  bool in_stream() const { return stream_ != nullptr; }
  Stream* stream() { return stream_; }

  void fill(float* to, float value, size_t floats);
  void copy(float* to, const float* from, size_t floats);

  // Copy pinned rows of a list between a buffer and their entries, or the entries' logs.
  void read_pinned(const ListPlan& list, std::span<const PlacedEntry> entries, size_t row_floats,
                   bool less_log, float* buffer);
  void save_pinned(const ListPlan& list, std::span<PlacedEntry> entries, size_t row_floats,
                   const float* buffer);
  void update_pinned(const ListPlan& list, std::span<PlacedEntry> entries, size_t row_floats,
                     const float* buffer);

  // Makes later work wait for the event. The caller's thread waits only if there is no stream.
  void wait(const Event& event);
  // Records the event behind the work so far. Without a stream, that has completed.
  void record(Event& event);

  // Bytes of rows that were copied or added while the caller waited.
  uint64_t caller_bytes() const { return caller_bytes_; }

 private:
  void add(float* to, const float* from, size_t floats, float factor = 1);
  // Between rows in order and the rows that an index names.
  void scatter(const float* from, const RowIndex& index, Rows to);
  void gather(ConstRows from, const RowIndex& index, float* to);
  void gather_add(ConstRows from, const RowIndex& index, float* to);
  template <class Enqueue>
  void run(const Kernel& kernel, Enqueue enqueue);

  bool here_;                    // this thread computes
  std::unique_ptr<Stream> own_;  // if there is no stream, and this thread cannot compute there
  Stream* stream_ = nullptr;     // the application's
  uint64_t caller_bytes_ = 0;
};

}  // namespace phub::geeps
