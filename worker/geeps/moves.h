// Functions of a demand: its consistency, the costs and lifetimes of buffers, and the order in
// which entries are pinned in device memory, which is the same for every budget.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/geeps/packing.h"
#include "worker/geeps/placement.h"

namespace phub::geeps {

// Throws Error(kInvalid) if the demand contradicts itself: all functions here and place() rely on
// numbers in range, and on accesses shorter than the circle.
void check(const Demand& demand);

// The entries that are pinned.
using Pins = std::vector<bool>;

// The largest number of phases for which an access has its buffer before it acquires it, to fill it
// in the background, and after it releases it, to empty it.
struct Lead {
  uint32_t before = 0, after = 0;
  bool operator==(const Lead&) const = default;
};
using Leads = std::vector<Lead>;  // by access

// The lifetime of an access's buffer.
struct Lifetime {
  uint32_t owner;  // the access that owns the buffer: this one, or one whose rows it keeps
  Lead lead;       // the lead of this access
  Span span;       // the owner's: from the first to the last access of the buffer
};
using Lifetimes = std::vector<Lifetime>;  // by access
Lifetimes lifetimes(const Demand& demand, const Leads& leads);

// The cost and the gain of pinning each entry.
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

// Bytes of the index of a batch's part whose entry is pinned; 0 if it is used in place.
uint64_t index_bytes(const Batch& batch, const BatchPart& part);

// The number of phases in which an access is live, and the longest lead with which it is still
// shorter than the circle.
uint32_t live_phases(const Access& access, uint32_t phases);
uint32_t longest_lead(const Access& access, uint32_t phases);

bool needs_buffer(const Demand& demand, const Access& access, const Pins& pins);

// The spans of the buffers, and the accesses that own them.
struct Buffers {
  std::vector<uint32_t> accesses;
  std::vector<Span> spans;
};
Buffers buffers_of(const Demand& demand, const Pins& pins, const Lifetimes& lives);

// The number of times that an access moves each of its rows that are not pinned.
uint32_t moves_of(const Access& access);

// Calls use(access, part, bytes) with the bytes that each access moves if the part's entry is not
// pinned.
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

// Bytes that an iteration moves between host and device.
uint64_t moved_bytes(const Demand& demand, const Pins& pins, const Lifetimes& lives);

// The order in which entries are pinned, until none is left that saves copies or memory: first
// those that save most per byte of memory. The memory by which the pool shrinks counts, so local
// data of the fullest phase comes early.
std::vector<uint32_t> order_of_moves(const Demand& demand, const Costs& costs,
                                     const Lifetimes& lives);
// The order of the paper's Algorithm 2, of all entries: local data of the phase that is the fullest
// without those before, other local data, parameters.
std::vector<uint32_t> peak_first_order(const Demand& demand, const Costs& costs,
                                       const Lifetimes& lives);

}  // namespace phub::geeps
