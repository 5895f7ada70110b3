// Memory on a NUMA node, and threads on a core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phub::numa {

// Anonymous, zeroed, page-aligned memory whose pages prefer `os_node`; huge pages where the kernel
// gives them. Unmapped on destruction. Throws std::runtime_error with the size and the errno.
class Memory {
 public:
  Memory() = default;
  Memory(size_t bytes, uint32_t os_node);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Gives every page of `range` its memory now, so that nobody waits for that later. REQUIRES: nobody
// else writes there meanwhile.
void populate(std::span<std::byte> range);

// Gives the whole pages of the range back to the kernel. Their content is lost.
void release(std::span<std::byte> range);

// Asks that the whole pages inside `range` (mapped, not yet touched) come from `os_node`. A hint:
// false where the machine has one node or the kernel refuses.
bool prefer_node(std::span<const std::byte> range, uint32_t os_node);

// The node that each page of `range` lies on now; -1 where it was never touched or the kernel does
// not tell (a container may forbid the question).
std::vector<int> nodes_of_pages(std::span<const std::byte> range);

// Pins the calling thread to one CPU. False if the kernel refuses.
bool pin_thread(uint32_t os_cpu);

}  // namespace phub::numa
