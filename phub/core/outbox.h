// Results on their way to the ranks: posted in batches, and owed where a queue has no room or its
// NIC no more budget. Each queue sends its owed results by the keys' priority; ranks take turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"
#include "phub/core/job_parameters.h"
#include "phub/core/notice.h"
#include "phub/core/trace.h"
#include "transport/layout.h"
#include "transport/switch/generation.h"
#include "transport/transport.h"
#include "transport/verdict.h"

namespace phub {

class Outbox {
 public:
  Outbox(const JobParameters& parameters, const JobArrays& arrays, Endpoint& endpoint,
         ChunkTable& table, const CoreTrace& trace);

  struct Size {
    uint64_t chunks = 0, queues = 1, max_ranks = 1;
    bool gated = false;
    bool shares_slots = false;
  };
  static constexpr uint64_t bytes(const Size& size) {  // held
    const uint64_t owed = IndexSet::bytes(size.chunks) + size.queues * IndexSet::bytes(128);
    const uint64_t untold = size.shares_slots ? IndexSet::bytes(size.chunks) : 0;
    return size.chunks * 2 * sizeof(uint32_t) + size.max_ranks * (owed + untold) +
           (size.gated ? Notice::bytes(size.queues, size.max_ranks) : 0);
  }

  // Sends a rank the chunk's result of round `completed`, if the rank is to receive that; kNever:
  // there is no such result. While initial parameters arrive, the result is the acknowledgement of
  // the last part.
  void send(uint32_t rank, uint32_t index, uint64_t completed);
  void send_to_all(uint32_t index, uint64_t completed);
  // Whether ranks are told that their gradient was taken, and not only of the result.
  bool tells_taken() const { return !untold_.empty(); }

  // Where chunks share slots: tells a rank that its gradient of this round was taken out of the
  // slot; kNever: there is none.
  void tell_taken(uint32_t rank, uint32_t index, uint64_t round);

  // Posts owed results, as far as there is room now; and before them, what is still to be told.
  // completed(rank, index) is the round of the result, taken(rank, index) that of tell_taken().
  // Returns false if none went out.
  template <typename Completed, typename Taken>
  bool pay(const Completed& completed, const Taken& taken);
  bool owes() const { return owed_total_ + untold_total_ > 0; }
  void forget(uint32_t rank);  // drops what is owed to it

  // In a gated job: the verdict goes out with the first result of its round, on every queue and to
  // every rank that was to take part in the round.
  void announce(const RoundVerdict& verdict);
  // In a job behind a switch: the first `ranks` ranks are told of a generation's beginning
  // (transport/switch/generation.h), with the next result on every queue. REQUIRES: no core has the
  // job yet.
  void tell_of_switch(uint32_t ranks) { beginning_ = Notice(table_.queues(), ranks); }
  // Tells this one from here on; index 0: none.
  void announce(const SwitchBeginning& beginning);
  // The rank has new queues: nothing went through them, and nothing is owed.
  void attached(uint32_t rank);

  // At the end of a pass: rings the doorbells when nothing else is to be done, or for enough
  // results at once. `moved`: the pass found something. True: the doorbells rang.
  bool flush_if_due(bool moved, size_t completed);
  bool has_unflushed() const { return unflushed_ > 0; }

 private:
  bool post_taken(uint32_t rank, uint32_t index, uint64_t round);
  template <typename Taken>
  bool tell_all(const Taken& taken);
  void clear_untold(uint32_t rank, uint32_t index);
  bool write_of(uint32_t rank, uint32_t index, uint64_t completed, Write& write) const;
  bool post(uint32_t rank, uint32_t index, uint64_t completed, const Write& write);
  bool has_notice() const { return (verdict_.number() | beginning_.number()) != 0; }
  bool tell(QueuePair to, uint64_t completed);

  struct Lane {  // a queue
    uint32_t first_chunk = 0;
    size_t owed = 0;         // to all ranks
    uint32_t next_rank = 0;  // the rank that is next
  };
  template <typename Completed>
  bool pay(uint32_t queue, uint32_t rank, const Completed& completed);
  IndexSet& owed(uint32_t queue, uint32_t rank) {
    return owed_[size_t{queue} * table_.max_ranks() + rank];
  }
  void count_owed(uint32_t queue, size_t before, size_t after) {
    lanes_[queue].owed += after - before;
    owed_total_ += after - before;
  }

  Endpoint& endpoint_;
  ChunkTable& table_;
  const CoreTrace& trace_;
  const ResultFormat result_format_;
  const uint64_t box_elements_, worker_elements_;  // all results', where differences are sent
  const uint64_t result_stride_;                   // between the results of two ranks
  const bool mirrors_;                             // JobRules
  uint32_t unflushed_ = 0;                         // chunks completed since the last flush
  std::vector<Lane> lanes_;                        // by queue
  std::vector<uint32_t> place_;  // by chunk: its place among those of its queue, by priority
  std::vector<uint32_t> chunk_;  // queue after queue, by place
  std::vector<IndexSet> owed_;   // [queue][rank]: places
  size_t owed_total_ = 0;
  // [rank]: chunks whose gradient was taken out of its slot, and nobody told it. Empty: ranks need
  // not be told.
  std::vector<IndexSet> untold_;
  size_t untold_total_ = 0;
  Notice verdict_;    // of a gated job; its number is the round
  Notice beginning_;  // of a switch's generation
};

template <typename Completed, typename Taken>
bool Outbox::pay(const Completed& completed, const Taken& taken) {
  if (!owes()) return false;
  bool paid = untold_total_ > 0 && tell_all(taken), tried = untold_total_ > 0 || paid;
  for (uint32_t queue = 0; queue < lanes_.size(); ++queue) {
    Lane& lane = lanes_[queue];
    // Each rank gets a result in turn, until no rank gets one; the first of these is next.
    for (uint32_t in_vain = 0; lane.owed > 0 && in_vain < table_.attached_end;) {
      const uint32_t rank = lane.next_rank % table_.attached_end;
      const bool owes = !table_.rank(rank).broken && !owed(queue, rank).empty();
      tried |= owes;
      const bool went = owes && pay(queue, rank, completed);
      paid |= went;
      in_vain = went ? 0 : in_vain + 1;
      lane.next_rank = rank + 1;
    }
  }
  if (tried) endpoint_.flush();
  return paid;
}

// Returns false if none went out.
template <typename Taken>
bool Outbox::tell_all(const Taken& taken) {
  bool any = false;
  for (uint32_t rank = 0; rank < untold_.size(); ++rank) {
    while (!untold_[rank].empty() && !table_.rank(rank).broken) {
      const uint32_t index = untold_[rank].lowest();
      const uint64_t round = taken(rank, index);
      if (round != kNever && !post_taken(rank, index, round)) break;
      clear_untold(rank, index);
      any = true;
    }
  }
  return any;
}

// Posts the first result that is owed to a rank on a queue. Returns false if there is no room.
template <typename Completed>
bool Outbox::pay(uint32_t queue, uint32_t rank, const Completed& completed) {
  IndexSet& places = owed(queue, rank);
  const uint32_t place = places.lowest();
  const uint32_t index = chunk_[lanes_[queue].first_chunk + place];
  const uint64_t round = completed(rank, index);
  Write write;
  if (write_of(rank, index, round, write) && !post(rank, index, round, write)) return false;
  places.erase(place);
  count_owed(queue, 1, 0);
  return true;
}

}  // namespace phub
