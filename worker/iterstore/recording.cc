#include "worker/iterstore/recording.h"

#include <algorithm>

namespace phub::iterstore {
namespace {

constexpr uint32_t kMostAccesses = 0x7fffffff;

}  // namespace

Use use_of(std::span<const Recording> threads, std::span<const Table> tables) {
  Use use;
  for (const Table& table : tables) use.rows.emplace_back(table.rows);
  for (const Recording& steps : threads) {
    uint32_t clocks = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].access == Access::kClock) {
        ++clocks;
        continue;
      }
      RowUse& row = use.rows[steps[i].table][steps[i].row];
      row.accesses += row.accesses < kMostAccesses ? 1 : 0;
      if (steps[i].access == Access::kUpdate) {
        row.updated = true;
      } else {
        row.first_part = std::min(row.first_part, static_cast<uint8_t>(i * kParts / steps.size()));
      }
      ++use.accesses;
    }
    use.clocks = std::max(use.clocks, clocks);
  }
  return use;
}

void keep_promise(Use& use, const Use& before, std::span<const Table> tables) {
  for (size_t t = 0; t < tables.size(); ++t) {
    if (!tables[t].fixed || before.rows.empty()) continue;
    for (uint64_t row = 0; row < tables[t].rows; ++row) {
      RowUse& now = use.rows[t][row];
      const RowUse& then = before.rows[t][row];
      if (then.accesses > 0 && now.accesses == 0) now.accesses = 1;
      now.updated |= then.updated;
    }
  }
}

}  // namespace phub::iterstore
