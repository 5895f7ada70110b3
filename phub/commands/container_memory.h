// What the control groups of this process let it use of the machine's memory: the limit of a
// container, a pod, a unit of systemd (MemoryMax, MemoryHigh) or a batch job.
#pragma once

#include <cstdint>
#include <string>

namespace phub {

struct ContainerMemory {
  static constexpr uint64_t kNoLimit = ~uint64_t{0};

  uint64_t limit = kNoLimit;      // bytes that the group may use
  uint64_t available = kNoLimit;  // bytes of these that it does not use: the page cache is not used
  std::string file;               // that has the limit; "": there is none
  std::string unknown;            // why a limit may be there that is not seen; "": none is
};

// The group with the least available, of this process's own and all around it, in both versions of
// control groups. `root` comes before /proc and /sys; tests have files of their own there.
ContainerMemory container_memory(const std::string& root = "");

}  // namespace phub
