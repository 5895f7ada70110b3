// The accesses of a process's threads in an iteration.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/iterstore/tables.h"

namespace phub::iterstore {

enum class Access : uint8_t { kRead, kUpdate, kClock };

struct Step {
  Access access = Access::kClock;
  uint32_t table = 0;  // unused by a clock
  uint64_t row = 0;
};

// The calls of one thread, in their order.
using Recording = std::vector<Step>;

// The part of an iteration in which something happens, of so many equal parts.
inline constexpr uint32_t kParts = 64;

// The use of a row by the threads of a process.
struct RowUse {
  uint32_t accesses = 0;        // at most 2^31 - 1
  uint8_t first_part = kParts;  // the part in which it is first read; updates wait for nothing
  bool updated = false;
};

struct Use {
  std::vector<std::vector<RowUse>> rows;  // by table and row
  uint64_t accesses = 0;                  // the number of all accesses
  uint32_t clocks = 0;                    // the largest number of clocks of a thread
};

Use use_of(std::span<const Recording> threads, std::span<const Table> tables);

// In tables that are fixed, a row that was used before may be used again.
void keep_promise(Use& use, const Use& before, std::span<const Table> tables);

}  // namespace phub::iterstore
