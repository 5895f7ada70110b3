// A device for links: memory of this process, which can say that it is a GPU's.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "transport/memory_device.h"

namespace phub {

class TestMemoryDevice final : public MemoryDevice {
 public:
  explicit TestMemoryDevice(int cuda_ordinal = -1) : cuda_ordinal_(cuda_ordinal) {}
  ~TestMemoryDevice() override { EXPECT_TRUE(allocated_.empty()) << "not released"; }

  const std::string& name() const override { return name_; }
  void* allocate(size_t bytes, std::string_view /*what*/) override {
    std::vector<std::byte> memory(bytes, std::byte{0xff});
    void* const at = memory.data();
    allocated_[at] = std::move(memory);
    return at;
  }
  void release(void* memory) override { allocated_.erase(memory); }
  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  int cuda_ordinal() const override { return cuda_ordinal_; }
  // No DMA buffer, but a descriptor: a driver that looks at it says EBADF or EINVAL, another one
  // EOPNOTSUPP.
  DmaBuf dma_buf(const void* memory, size_t /*bytes*/) const override {
    return {Fd(memfd_create("phub-test-gpu", MFD_CLOEXEC)), offset_of(memory)};
  }
  void flush_nic_writes() override { ++flushes_; }

  // What dma_buf() says of an array: told apart by its first byte's address.
  static uint64_t offset_of(const void* memory) {
    return reinterpret_cast<uintptr_t>(memory) % 4096;
  }
  bool empty() const { return allocated_.empty(); }
  int flushes() const { return flushes_; }

 private:
  const int cuda_ordinal_;
  std::atomic<int> flushes_ = 0;
  const std::string name_ = "a device of a test";
  std::map<void*, std::vector<std::byte>> allocated_;
};

}  // namespace phub
