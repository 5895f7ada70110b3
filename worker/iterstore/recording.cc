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
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].access == Access::kClock) continue;
      RowUse& row = use.rows[steps[i].table][steps[i].row];
      row.accesses += row.accesses < kMostAccesses ? 1 : 0;
      if (steps[i].access == Access::kUpdate) {
        row.updated = true;
      } else {
        row.first_part = std::min(row.first_part, static_cast<uint8_t>(i * kParts / steps.size()));
      }
      ++use.accesses;
    }
  }
  return use;
}

}  // namespace phub::iterstore
