// Wake the cores of a job that sleep: an eventfd for each.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace phub {

class CoreBells {
 public:
  // Throws Error(kFull) if there are not enough file descriptors.
  explicit CoreBells(uint32_t cores);
  ~CoreBells();
  CoreBells(const CoreBells&) = delete;
  CoreBells& operator=(const CoreBells&) = delete;
  static constexpr uint64_t bytes(uint64_t cores) { return cores * sizeof(Bell); }

  // Before the core sleeps: the next ring() will wake it. The core then looks once more whether
  // what it waits for has come.
  void arm(uint32_t core) { bells_[core].armed.store(true, std::memory_order_seq_cst); }
  int fd(uint32_t core) const { return bells_[core].fd; }  // edge triggered
  // Wakes the armed cores, but for one; kNoCore: all of them. Any thread.
  static constexpr uint32_t kNoCore = ~uint32_t{0};
  void ring(uint32_t but_core);

 private:
  struct alignas(64) Bell {
    int fd = -1;
    std::atomic<bool> armed{false};
  };
  const uint32_t cores_;
  std::unique_ptr<Bell[]> bells_;
};

}  // namespace phub
