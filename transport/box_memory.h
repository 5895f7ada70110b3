// The box's memory of a job whose workers have their own (tcp, verbs): the results, and the slots
// of every rank. All of it is allocated at the beginning and stays: a rank's contribution outlives
// its incarnation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "numa/memory.h"
#include "transport/transport.h"

namespace phub {

// Throws Error(kInvalid) that names `transport` when the layout makes no sense.
const LinkLayout& checked(const LinkLayout& layout, std::string_view transport);

// Throws Error(kFull) that names `what` where there is no memory.
numa::Memory allocate(uint64_t bytes, uint32_t os_node, std::string_view what);

class BoxMemory {
 public:
  // Throws Error: kInvalid when the layout makes no sense (`transport` is named), kFull when there
  // is no memory. Pages are not touched, and go to the nodes of layout.runs when they are.
  BoxMemory(const LinkLayout& layout, std::string_view transport);

  std::span<std::byte> results() const { return results_.bytes(); }
  // REQUIRES: the layout has slots of the rank. Empty if it is windowed.
  std::span<std::byte> slots(uint32_t rank) const;

 private:
  uint64_t slots_bytes_;
  numa::Memory results_;
  uint32_t first_rank_;
  bool windowed_;
  std::vector<numa::Memory> slots_;  // by rank, from first_rank_ on
};

}  // namespace phub
