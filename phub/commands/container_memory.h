// The limits that the control groups of this process set on its use of the machine's memory: those
// of a container, a pod, a unit of systemd (MemoryMax, MemoryHigh) or a batch job.
#pragma once

#include <cstdint>
#include <string>

namespace phub {

struct ContainerMemory {
  static constexpr uint64_t kNoLimit = ~uint64_t{0};

  uint64_t limit = kNoLimit;      // bytes that the group may use
  uint64_t available = kNoLimit;  // bytes of these that it does not use: the page cache is not used
  std::string file;               // the file with the limit; "": there is none
  std::string unknown;            // the reason why there may be an unseen limit; "": there is none
};

// The group with the least available, of this process's own and all around it, in both versions of
// control groups. `root` comes before /proc and /sys; tests have files of their own there.
ContainerMemory container_memory(const std::string& root = "");

}  // namespace phub
