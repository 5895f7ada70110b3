// Copies rows between host memory and buffers on the device: long runs directly, short ones through
// pinned staging memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "worker/device/device.h"
#include "worker/geeps/rows.h"
#include "worker/geeps/staged_buffers.h"

namespace phub::geeps {

// A buffer whose parts store rows: each part those in its stretch.
struct StoredBuffer {
  const float* rows;
  Stretch stretch;
  StagedBuffers& staged;  // the copies that all parts share
};

// Not thread-safe. Copies are enqueued on the stream; those through staging memory to the host have
// completed when the call returns.
class HostRows {
 public:
  HostRows(Device& device, Stream& stream);
  ~HostRows();  // waits for copies from staging memory
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;

  // Buffer row `first` = memory row `source`, less that of `log` unless it is null.
  void fetch(float* buffer, const float* memory, const float* log, std::span<const Run> runs,
             uint32_t row_floats);
  // Memory row `source` = buffer row `first`.
  void store(const StoredBuffer& buffer, float* memory, std::span<const Run> runs,
             uint32_t row_floats);
  // Does the same with +=, and has completed when it returns.
  void store_add(const StoredBuffer& buffer, float* memory, std::span<const Run> runs,
                 uint32_t row_floats);

  // Whether fetch() uses staging memory, so that it has read the rows when it returns.
  static bool staged(std::span<const Run> runs, uint32_t row_floats);
  uint64_t moved_bytes() const { return moved_; }    // bytes of all rows
  uint64_t staged_bytes() const { return staged_; }  // through staging memory, with gaps

 private:
  float* staging(size_t floats);  // waits until no copy uses it
  template <class Use>
  void through_staging(const StoredBuffer& buffer, std::span<const Run> runs, uint32_t row_floats,
                       Use use);

  Device& device_;
  Stream& stream_;
  HostMemory staging_;
  std::unique_ptr<Event> staged_copies_;
  uint64_t moved_ = 0, staged_ = 0;
};

}  // namespace phub::geeps
