// The memory of a worker that its application sees: results may be read and not written, and
// nothing can be touched once the worker is gone, whatever the transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "transport/sealed_memory.h"

namespace phub {

// Results that are received into this process: the pages are mapped twice, once to be written by
// the transport.
class ResultMemory {
 public:
  ResultMemory() = default;
  // Pages prefer `os_node`. `shared`: the box maps it, too. Throws Error(kFull).
  ResultMemory(uint64_t bytes, uint32_t os_node, bool shared = false);

  std::span<std::byte> writable() const { return writable_.bytes(); }
  std::span<const std::byte> readable() const { return readable_.bytes(); }
  const Fd& fd() const { return writable_.fd(); }  // none unless it is shared
  void bury() noexcept;

 private:
  SealedMemory writable_, readable_;
};

namespace internal {
void make_inaccessible(std::span<const std::byte> memory) noexcept;
void keep(std::shared_ptr<const void> mapping);
}  // namespace internal

// Gives the pages of a mapping back, and keeps its addresses: a thread that still has a pointer
// there gets a SIGSEGV, and not other memory. After a thousand more of them the addresses are given
// back too. `Memory` unmaps itself when it goes.
template <typename Memory>
void bury(Memory memory) noexcept {
  internal::make_inaccessible(memory.bytes());
  try {
    internal::keep(std::make_shared<const Memory>(std::move(memory)));
  } catch (...) {  // NOLINT(bugprone-empty-catch): the addresses go with `memory`
  }
}

}  // namespace phub
