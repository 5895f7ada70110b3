// The order in which entries are pinned in device memory, the same for every budget.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/geeps/packing.h"
#include "worker/geeps/placement.h"

namespace phub::geeps {

// Which entries are pinned.
using Pins = std::vector<bool>;

// The phases for which an access has its buffer before it is asked for, to fill it, and after it is
// given back, to empty it, where it is filled or emptied in the background; at most.
struct Lead {
  uint32_t before = 0, after = 0;
  bool operator==(const Lead&) const = default;
};
using Leads = std::vector<Lead>;  // by access

// When the buffer of an access is live.
struct Lifetime {
  uint32_t owner;  // the access whose buffer it is: this one, or one that kept it
  Lead lead;       // that it has
  Span span;       // of the owner: from the first to the last of its accesses
};
using Lifetimes = std::vector<Lifetime>;  // by access
Lifetimes lifetimes(const Demand& demand, const Leads& leads);

// What pinning costs and saves, by entry.
class Costs {
 public:
  Costs(const Demand& demand, const Lifetimes& lives);

  uint64_t pin_bytes(uint32_t entry) const { return pin_bytes_[entry]; }      // rows, log, indexes
  uint64_t saved_bytes(uint32_t entry) const { return saved_bytes_[entry]; }  // per iteration
  double density(uint32_t entry) const;                                       // saved / pinned
  // Entries that save something, best density first.
  const std::vector<uint32_t>& by_density() const { return by_density_; }

 private:
  std::vector<uint64_t> pin_bytes_, saved_bytes_;
  std::vector<uint32_t> by_density_;
};

uint64_t buffer_bytes(const Demand& demand, const Access& access);

// Bytes of the index that a batch needs for a part whose entry is pinned; 0 if it is used in place.
uint64_t index_bytes(const Batch& batch, const BatchPart& part);

// Phases that an access is live in, and the longest lead that leaves it shorter than the circle.
uint32_t live_phases(const Access& access, uint32_t phases);
uint32_t longest_lead(const Access& access, uint32_t phases);

bool needs_buffer(const Demand& demand, const Access& access, const Pins& pins);

// The spans of the buffers, and the accesses that own them.
struct Buffers {
  std::vector<uint32_t> accesses;
  std::vector<Span> spans;
};
Buffers buffers_of(const Demand& demand, const Pins& pins, const Lifetimes& lives);

// How often an access moves each of its rows that is not pinned.
uint32_t moves_of(const Access& access);

// Calls use(access, part, bytes) for what each access moves unless the part's entry is pinned.
template <class Use>
void for_moves(const Demand& demand, const Lifetimes& lives, Use use) {
  for (uint32_t i = 0; i < lives.size(); ++i) {
    if (lives[i].owner != i) continue;
    const Access& access = demand.accesses[i];
    for (const BatchPart& part : demand.batches[access.batch].parts) {
      use(i, part, moves_of(access) * part.bytes);
    }
  }
}

// Between host and device by the accesses of one iteration.
uint64_t moved_bytes(const Demand& demand, const Pins& pins, const Lifetimes& lives);

// Moves until nothing is left that saves copies or memory: first those that cost least memory for
// what they save, the shrinking of the pool counted; that is local data of the fullest phase.
std::vector<uint32_t> order_of_moves(const Demand& demand, const Costs& costs,
                                     const Lifetimes& lives);

}  // namespace phub::geeps
