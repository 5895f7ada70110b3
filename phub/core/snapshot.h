// A core's part of a snapshot: copies of its chunks as they are between two rounds.
//
// A snapshot of round R has every chunk after the rounds before R and before R itself. A chunk that
// is still in an earlier round is awaited; one that has come to R is due. It is copied when the
// core has nothing else to do, and at the latest before it closes R. So nobody waits for a
// snapshot. Nothing allocates after construction.
#pragma once

#include <cstdint>
#include <utility>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"
#include "phub/core/job_parameters.h"
#include "phub/core/trace.h"

namespace phub {

class Snapshot {
 public:
  // Copies what `arrays` has to arrays.copy, where that is not null.
  Snapshot(const JobArrays& arrays, const ChunkTable& table, const CoreTrace& trace);
  static constexpr uint64_t bytes(uint64_t chunks) {  // held
    return 2 * (IndexSet::bytes(chunks) - sizeof(IndexSet));
  }

  // At a boundary. REQUIRES: the snapshot before it is complete.
  void begin(uint64_t round);
  // The chunk has begun another round.
  void reached(uint32_t index) {
    if (!awaited_.empty() && awaited_.contains(index) && table_[index].round >= round_) {
      awaited_.erase(index);
      due_.insert(index);
    }
  }

  bool any_due() const { return !due_.empty(); }
  bool is_due(uint32_t index) const { return any_due() && due_.contains(index); }
  uint32_t next() const { return due_.lowest(); }  // REQUIRES: any_due()
  void copy(uint32_t index);                       // REQUIRES: is_due(index)

  uint64_t cost(const CoreChunk& chunk) const { return chunk.elements * bytes_per_element_; }

  // The last chunk has been copied, and nobody has taken that yet.
  bool is_complete() const { return under_way_ && due_.empty() && awaited_.empty(); }
  bool take_complete() { return is_complete() && std::exchange(under_way_, false); }
  uint64_t round() const { return round_; }

 private:
  const JobArrays arrays_;
  const ChunkTable& table_;
  const CoreTrace& trace_;
  IndexSet awaited_;
  IndexSet due_;
  uint64_t round_ = 0;
  bool under_way_ = false;
  uint64_t bytes_per_element_ = 0;  // read and written
};

}  // namespace phub
