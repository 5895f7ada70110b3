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

// What a link needs of it. Thread-safe. Throws Error.
class MemoryDevice {
 public:
  virtual ~MemoryDevice() = default;
  virtual const std::string& name() const = 0;
  // `what` is for the error, kFull. The host must not touch the addresses, unless the memory is
  // its.
  virtual void* allocate(size_t bytes, std::string_view what) = 0;
  virtual void release(void* memory) = 0;
  // From the host and to it; they block.
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  virtual void read(void* to, const void* from, size_t bytes) = 0;

  // Which of CUDA's devices it is. -1: its memory is the host's, and NICs register it as such.
  virtual int cuda_ordinal() const = 0;
  // Of memory of allocate(), for NICs. kInvalid: its memory is the host's, or the GPU or its driver
  // cannot.
  virtual DmaBuf dma_buf(const void* memory, size_t bytes) const = 0;
  // What NICs have written until now is what later work of the device reads.
  virtual void flush_nic_writes() = 0;
};

}  // namespace phub
