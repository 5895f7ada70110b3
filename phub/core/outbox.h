// Results on their way to the ranks: posted in batches, and owed where a queue has no room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"
#include "phub/core/job_parameters.h"
#include "phub/core/trace.h"
#include "transport/transport.h"

namespace phub {

class Outbox {
 public:
  Outbox(const JobParameters& parameters, const JobArrays& arrays, Endpoint& endpoint,
         ChunkTable& table, const CoreTrace& trace);

  static constexpr uint64_t bytes(uint64_t chunks, uint64_t max_ranks) {  // held
    return max_ranks * IndexSet::bytes(chunks);
  }

  // Sends a rank the chunk's result of round `completed`, if the rank is to receive that; kNever:
  // there is no such result. While initial parameters arrive, the result is the acknowledgement of
  // the last part.
  void send(uint32_t rank, uint32_t index, uint64_t completed);
  void send_to_all(uint32_t index, uint64_t completed);

  // Posts what is owed, as far as there is room now. completed(rank, index) is the round of the
  // result. False: nothing was owed to anybody who is there.
  template <typename Completed>
  bool pay(const Completed& completed);
  bool owes() const { return owed_total_ > 0; }
  void forget(uint32_t rank);  // what is owed to it

  // At the end of a pass: rings the doorbells when nothing else is to be done, or for enough
  // results at once. `moved`: the pass found something. True: the doorbells rang.
  bool flush_if_due(bool moved, size_t completed);
  bool has_unflushed() const { return unflushed_ > 0; }

 private:
  bool write_of(uint32_t rank, uint32_t index, uint64_t completed, Write& write) const;
  bool post(uint32_t rank, uint32_t index, const Write& write);

  Endpoint& endpoint_;
  ChunkTable& table_;
  const CoreTrace& trace_;
  const uint32_t result_bytes_;   // per element
  const uint64_t result_stride_;  // between the results of two ranks
  uint32_t unflushed_ = 0;        // chunks completed since the last flush
  std::vector<IndexSet> owed_;    // of each rank: chunks
  size_t owed_total_ = 0;
};

template <typename Completed>
bool Outbox::pay(const Completed& completed) {
  if (owed_total_ == 0) return false;
  bool tried = false;
  for (uint32_t rank = 0; rank < table_.attached_end; ++rank) {
    if (table_.rank(rank).broken) continue;
    IndexSet& owed = owed_[rank];
    while (!owed.empty()) {
      const uint32_t index = owed.lowest();
      Write write;
      tried = true;
      if (write_of(rank, index, completed(rank, index), write) && !post(rank, index, write)) break;
      owed.erase(index);
      --owed_total_;
    }
  }
  if (tried) endpoint_.flush();
  return tried;
}

}  // namespace phub
