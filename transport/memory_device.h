// A device (a GPU) whose memory NICs read and write themselves. worker/device/ has those that there
// are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/fd.h"

namespace phub {

// Memory of a device as the kernel's DMA buffer, in which it begins at `offset`.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
};

// A link's interface to the device. Thread-safe. Throws Error.
class MemoryDevice {
 public:
  virtual ~MemoryDevice() = default;
  virtual const std::string& name() const = 0;
  // `what` is for the error, kFull. The host must not touch the addresses, unless the memory is
  // its.
  virtual void* allocate(size_t bytes, std::string_view what) = 0;
  virtual void release(void* memory) = 0;
  // They copy from the host and to it, and block.
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  virtual void read(void* to, const void* from, size_t bytes) = 0;

  // The number of the device for CUDA. -1: its memory is the host's, and NICs register it as such.
  virtual int cuda_ordinal() const = 0;
  // Exports memory of allocate() for NICs. Throws kInvalid if its memory is the host's, or if the
  // GPU or its driver cannot do it.
  virtual DmaBuf dma_buf(const void* memory, size_t bytes) const = 0;
  // Makes later work of the device see all bytes that NICs have written until now.
  virtual void flush_nic_writes() = 0;
};

}  // namespace phub
