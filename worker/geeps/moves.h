// The order in which entries are pinned in device memory, the same for every budget.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/geeps/packing.h"
#include "worker/geeps/placement.h"

namespace phub::geeps {

// Which entries are pinned.
using Pins = std::vector<bool>;

// What pinning costs and saves, by entry.
class Costs {
 public:
  explicit Costs(const Demand& demand);

  uint64_t pin_bytes(uint32_t entry) const { return pin_bytes_[entry]; }      // rows, log, indexes
  uint64_t saved_bytes(uint32_t entry) const { return saved_bytes_[entry]; }  // per iteration
  uint64_t all_moved_bytes() const { return all_moved_; }  // per iteration, if nothing is pinned
  double density(uint32_t entry) const;                    // saved / pinned
  // Entries that save something, best density first.
  const std::vector<uint32_t>& by_density() const { return by_density_; }

  uint64_t buffer_bytes(const Access& access) const { return buffer_bytes_[access.batch]; }

 private:
  std::vector<uint64_t> pin_bytes_, saved_bytes_, buffer_bytes_;
  std::vector<uint32_t> by_density_;
  uint64_t all_moved_ = 0;
};

// Bytes of the index that a batch needs for a part whose entry is pinned; 0 if it is used in place.
uint64_t index_bytes(const Batch& batch, const BatchPart& part);

// Phases that an access is live in, and the longest lead that leaves it shorter than the circle.
uint32_t live_phases(const Access& access, uint32_t phases);
uint32_t longest_lead(const Access& access, uint32_t phases);

// The phases before and after its use that an access keeps its buffer for copies: `lead` phases
// before if rows are fetched into it, one after (if there is a lead) if they are saved from it. A
// buffer that is neither filled nor emptied in the background needs no time for it.
struct Margins {
  uint32_t before = 0, after = 0;
};
Margins margins_of(const Access& access, uint32_t phases, uint32_t lead);

bool needs_buffer(const Demand& demand, const Access& access, const Pins& pins);

// The buffers' spans, of those accesses that need one, with these leads (by access).
struct Buffers {
  std::vector<uint32_t> accesses;
  std::vector<Span> spans;
};
Buffers buffers_of(const Demand& demand, const Costs& costs, const Pins& pins,
                   const std::vector<uint32_t>& leads);

// Moves until nothing is left that saves copies or memory: first those that cost least memory for
// what they save, the shrinking of the pool counted; that is local data of the fullest phase.
std::vector<uint32_t> order_of_moves(const Demand& demand, const Costs& costs,
                                     const std::vector<uint32_t>& leads);

}  // namespace phub::geeps
