// Buffers on the device, copied to pinned host memory for all parts of a task: if rows of several
// pieces lie among each other, the stretch from the first to the last of them is copied once.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "worker/device/device.h"

namespace phub::geeps {

// Pinned host memory that is used again: as many pieces as were taken at one time, each as large as
// the largest that it was taken for. Thread-safe.
class StagingPool {
 public:
  explicit StagingPool(Device& device) : device_(device) {}

  HostMemory take(size_t bytes);  // the smallest free piece of so many or more
  void give(HostMemory memory);

 private:
  Device& device_;
  std::mutex mutex_;
  std::multimap<size_t, HostMemory> free_;  // by bytes
};

// Belongs to one task. Thread-safe.
class StagedBuffers {
 public:
  explicit StagedBuffers(StagingPool& pool) : pool_(pool) {}
  ~StagedBuffers();
  StagedBuffers(const StagedBuffers&) = delete;
  StagedBuffers& operator=(const StagedBuffers&) = delete;

  struct Copy {
    const float* floats;
    size_t copied_bytes;  // the bytes that this call copied
  };
  // The first call for a buffer copies it on the stream; later ones wait for the first. All return
  // when the stream's own work so far is done, which may write where the rows go: `done` is
  // recorded behind it. The copy stays until the end of this. REQUIRES: `count` is the same in all
  // calls.
  Copy copy_of(const float* buffer, size_t count, Stream& stream, Event& done);

 private:
  struct Buffer {
    std::mutex mutex;
    HostMemory memory;  // empty: not copied yet
  };

  StagingPool& pool_;
  std::mutex mutex_;  // guards the map
  std::map<const float*, Buffer> buffers_;
};

}  // namespace phub::geeps
