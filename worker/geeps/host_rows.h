// Rows between host memory and buffers on the device: by the run where runs are long, otherwise
// gathered in pinned memory first. For threads of the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "worker/device/device.h"
#include "worker/geeps/rows.h"

namespace phub::geeps {

// Not thread-safe. Copies are enqueued on the stream; those through pinned memory to the host are
// done when the call returns.
class HostRows {
 public:
  HostRows(Device& device, Stream& stream);
  ~HostRows();  // waits for copies from pinned memory
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;

  // Buffer row `first` = memory row `source`, less that of `log` unless it is null.
  void fetch(float* buffer, const float* memory, const float* log, std::span<const Run> runs,
             uint32_t row_floats);
  // Memory row `source` = buffer row `first`.
  void store(const float* buffer, float* memory, std::span<const Run> runs, uint32_t row_floats);
  // The same, +=. Done when it returns.
  void store_add(const float* buffer, float* memory, std::span<const Run> runs,
                 uint32_t row_floats);

  // Whether fetch() reads the memory before it returns.
  static bool staged(std::span<const Run> runs, uint32_t row_floats);
  uint64_t moved_bytes() const { return moved_; }    // of rows, in all
  uint64_t staged_bytes() const { return staged_; }  // of these, through pinned memory

 private:
  float* staging(size_t floats);  // that no copy uses
  template <class Use>
  void through_staging(const float* buffer, std::span<const Run> runs, uint32_t row_floats,
                       Use use);

  Device& device_;
  Stream& stream_;
  HostMemory staging_;
  std::unique_ptr<Event> staged_copies_;
  uint64_t moved_ = 0, staged_ = 0;
};

}  // namespace phub::geeps
