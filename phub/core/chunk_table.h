// Who is expected at a chunk and who has arrived: the table of a core's chunks, and of the ranks.
//
// It knows nothing of transports or sums. Nothing allocates after construction.
//
// Hot are a chunk and the words of those that have arrived. The words of those that are expected
// are used by boundaries and probes, and in the rounds until the latest comer's first.
//
// A rank may be *idle* at a chunk: it neither writes nor reads it (transport/control/interest.h).
// It is in the chunk's rounds all the same, as with a null, and is not waited for. A chunk at which
// all ranks of a round are idle *follows*: nothing makes it go on but a boundary, which says up to
// which round. Then it makes those rounds' steps, one after another, with a gradient of zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/slots.h"
#include "phub/core/index_set.h"
#include "phub/core/messages.h"
#include "transport/control/interest.h"
#include "transport/layout.h"

namespace phub {

inline constexpr uint32_t kNoChunk = ~0u;

struct CoreChunk {
  uint64_t round = 0;  // in progress; 0: initial parameters are awaited
  // In the box's arrays and in the worker's results, elements; and the compact form of a matrix's
  // gradient, in what these leave free (SlotShape).
  uint64_t offset : 44 = 0;
  uint64_t columns : 20 = 0;
  uint64_t worker_offset : 44 = 0;
  uint64_t limit : 20 = 0;
  int64_t step_offset = 0;        // its optimizer's step in a round is the round plus this
  uint64_t slot_offset : 48 = 0;  // in the slots of a rank, bytes
  kernels::DType dtype = kernels::DType::kF32;  // of its gradients
  uint8_t initial_parts = 0;                    // parts of the initial parameters that have arrived
  uint32_t elements = 0;
  uint32_t id = 0;  // in the plan
  int32_t priority = 0;
  uint16_t expected = 0;  // ranks in this round but idle ones (lock-step only)
  uint16_t missing = 0;   // of those, ranks that have not arrived
  uint16_t arrived = 0;   // contributions that have arrived, null ones included
  uint16_t hyper_class = 0;
  uint16_t queue = 0;       // of the core's
  bool closed : 1 = false;  // this round: its result is pending
  bool unused : 1 = false;  // this round: nobody has sent a gradient, nothing is applied
  bool vacant : 1 = false;  // this round: nobody is in it, and it is completed all the same
  bool lazy : 1 = false;    // the optimizer's steps are those of rows that somebody has sent
  bool skips : 1 = true;    // rounds without a gradient may be no steps (JobSpec::unused)
  bool summed : 1 = false;  // this round: its sum has come through a switch (switch_intake.h)
  bool same : 1 = false;    // the latest result is that of the round before (KeySpec::lazy)
  kernels::SlotForm form : 2 = kernels::SlotForm::kElements;
  kernels::ValueType value : 2 = kernels::ValueType::kF32;  // of a fold
  kernels::Operation operation : 3 = kernels::Operation::kNone;

  // Of a gradient.
  kernels::SlotShape slot() const { return {elements, dtype, form, columns, limit, fold()}; }
  kernels::Fold fold() const { return {value, operation}; }
  uint64_t slot_bytes() const { return kernels::slot_bytes(slot()); }
  // Of what is in the slot: on the wire.
  uint64_t sent_bytes(const std::byte* slots) const {
    if (form != kernels::SlotForm::kRows) return slot_bytes();
    return kernels::bytes_of_rows(columns, kernels::row_count(slots + slot_offset));
  }
  uint64_t steps_before(uint64_t r) const { return r - 1 + static_cast<uint64_t>(step_offset); }
  void set_steps_before(uint64_t r, uint64_t steps) {
    step_offset = static_cast<int64_t>(steps + 1 - r);
  }
};

struct CoreRank {
  uint64_t first_round = kNever;   // expected from this round on; kNever: not at all
  uint64_t results_from = kNever;  // receives the results of this round and later ones
  uint64_t arrivals = 0;           // ever
  const std::byte* slots = nullptr;
  uint32_t incarnation = 0;
  uint32_t open = 0;     // its contributions in chunks that are not complete
  uint32_t unheard = 0;  // chunks on which nothing of it has come since it reconnected
  bool attached = false;
  bool broken = false;     // its connection; ignored until a boundary or a reconnection
  bool selective = false;  // there are chunks that it does not write, or not read
};

class ChunkTable {
 public:
  // `chunks` queue after queue, each in the order of their index in it. The ranks in `expected`
  // take part from round 1 on.
  ChunkTable(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
             std::span<const uint32_t> expected);

  // What a table holds, beside itself. Chunks and their words of ranks are most.
  static constexpr uint64_t bytes(uint64_t chunks, uint64_t queues, uint64_t max_ranks) {
    return chunks * (sizeof(CoreChunk) + (6 * bit_words(max_ranks) + 1) * sizeof(uint64_t)) +
           max_ranks * sizeof(CoreRank) + queues * (sizeof(QueueCounters) + sizeof(uint32_t));
  }

  uint32_t size() const { return static_cast<uint32_t>(chunks_.size()); }
  CoreChunk& operator[](uint32_t index) { return chunks_[index]; }
  const CoreChunk& operator[](uint32_t index) const { return chunks_[index]; }
  std::span<const CoreChunk> chunks() const { return chunks_; }
  CoreRank& rank(uint32_t rank) { return ranks_[rank]; }
  const CoreRank& rank(uint32_t rank) const { return ranks_[rank]; }
  uint32_t index_of(const CoreChunk& chunk) const {  // REQUIRES: it is of this table
    return static_cast<uint32_t>(&chunk - chunks_.data());
  }
  uint32_t max_ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t words() const { return words_; }  // of 64 ranks each

  // kNoChunk: the queue has no such chunk.
  uint32_t find(uint32_t queue, uint32_t chunk_of_queue) const {
    const uint32_t index = queue_first_[queue] + chunk_of_queue;
    return index < queue_first_[queue + 1] ? index : kNoChunk;
  }
  uint32_t index_in_queue(uint32_t index) const {
    return index - queue_first_[chunks_[index].queue];
  }
  uint32_t queues() const { return static_cast<uint32_t>(counters_.size()); }

  // Contributions to a chunk's round in progress.
  bool has(uint32_t rank, uint32_t index) const { return bit(arrived_, rank, index); }
  bool is_null(uint32_t rank, uint32_t index) const { return bit(null_, rank, index); }
  void mark(uint32_t rank, uint32_t index, bool null);
  void unmark(uint32_t rank, uint32_t index);
  // Calls visit(rank) in the order of the ranks.
  template <typename Visit>
  void for_each_arrived(uint32_t index, const Visit& visit) const {
    for (uint32_t w = 0; w < words_; ++w) for_each_bit(arrived_[at(index, w)], w, visit);
  }
  // The same, without null contributions.
  template <typename Visit>
  void for_each_gradient(uint32_t index, const Visit& visit) const {
    for (uint32_t w = 0; w < words_; ++w) {
      for_each_bit(arrived_[at(index, w)] & ~null_[at(index, w)], w, visit);
    }
  }

  // After a reconnection a rank sends again what was not answered. Until that of a chunk is here,
  // no result of the chunk goes to the rank: what it sends next could overtake what it sent again.
  void reconnected(uint32_t rank);
  void joined(uint32_t rank);  // nothing of it is under way
  bool is_heard(uint32_t rank, uint32_t index) const {
    return ranks_[rank].unheard == 0 || !bit(unheard_, rank, index);
  }
  void hear(uint32_t rank, uint32_t index) {
    if (is_heard(rank, index)) return;
    unheard_[at(index, rank / 64)] &= ~(uint64_t{1} << (rank % 64));
    --ranks_[rank].unheard;
  }
  // How many ranks of the training took part in what has arrived. Those of racks are counted once
  // count_rack_ranks() was called; else every rank is one.
  void count_rack_ranks() { participants_.resize(chunks_.size()); }
  static constexpr uint64_t rack_bytes(uint64_t chunks) { return chunks * sizeof(uint32_t); }
  void add_participants(uint32_t index, uint32_t rack, uint32_t count) {
    uint32_t& all = participants_[index];
    all = count == kNoneLeft ? (rack + 1) << 16 | (all & kCounted) : all + count;
  }
  uint32_t participants(uint32_t index) const {
    if (!participants_.empty()) return participants_[index] & kCounted;
    const uint32_t ranks = chunks_[index].arrived + (selective_ > 0 ? idle_in_round(index) : 0);
    return ranks == 0 && follows(index) ? 1 : ranks;  // who was idle may be gone since
  }
  // A rack that says that it had to leave out all of its ranks. Nothing: there is none.
  std::optional<uint32_t> left_out_rack(uint32_t index) const {
    if (participants_.empty() || participants_[index] >> 16 == 0) return {};
    return (participants_[index] >> 16) - 1;
  }

  // Rounds.
  void begin_round(uint32_t index, uint64_t round);
  // The first round after `round` that somebody is expected in at the chunk. Where everybody who
  // knew a round is gone and the others begin later, nobody will ever take part in it: such
  // rounds are skipped, and change nothing.
  uint64_t next_round(uint32_t index, uint64_t round) const;
  void count_completed(uint32_t index, uint64_t rounds = 1) {
    chunks_completed_ += rounds;
    counters_[chunks_[index].queue].chunks += rounds;
  }

  // Who is expected. At a boundary; kNever: not at all. `interest`: by chunk of the job; empty:
  // everything.
  void expect(uint32_t rank, uint64_t first_round, std::span<const ChunkInterest> interest = {});
  uint32_t expected_count() const { return expected_count_; }  // in any round
  // Of 64 ranks, those that are expected in the chunk's round and have not arrived.
  uint64_t lacking(uint32_t index, uint32_t word) const {
    return in_round_[at(index, word)] & ~idle_[at(index, word)] & ~arrived_[at(index, word)];
  }
  uint64_t arrived_word(uint32_t index, uint32_t word) const { return arrived_[at(index, word)]; }
  // Whether every chunk is past the latest change of who is expected.
  bool settled();

  bool any_selective() const { return selective_ > 0; }
  bool is_idle(uint32_t rank, uint32_t index) const {
    return ranks_[rank].selective && bit(idle_, rank, index);
  }
  bool reads(uint32_t rank, uint32_t index) const {
    return !ranks_[rank].selective || !bit(unread_, rank, index);
  }
  // Nobody is waited for in the chunk's round, and nothing has come.
  bool is_left_alone(uint32_t index) const {
    const CoreChunk& chunk = chunks_[index];
    return chunk.expected == 0 && chunk.arrived == 0 &&
           (follows(index) || (selective_ > 0 && idle_in_round(index) > 0));
  }
  // At a boundary: a chunk that is left alone goes on to this round, or to the next one that
  // somebody is expected in. Who is idle in its round is in all of these, also if he is lost next.
  // `after`: the ranks of the boundary are lost and admitted; before, it goes no further than
  // `round`.
  void follow(uint32_t index, uint64_t round, bool after);
  // The chunk completes its round without any contribution.
  bool follows(uint32_t index) const {
    const CoreChunk& chunk = chunks_[index];
    return chunk.expected == 0 && chunk.arrived == 0 && chunk.round > 0 &&
           chunk.round < follows_to_[index];
  }
  // Who is in the rounds before this one is settled.
  uint64_t open_round(uint32_t index) const {
    return std::max(chunks_[index].round, follows_to_[index]);
  }

  uint64_t chunks_completed() const { return chunks_completed_; }
  std::span<QueueCounters> counters() { return counters_; }
  std::span<const QueueCounters> counters() const { return counters_; }

  // Between hold and commit of a boundary no chunk completes this round or a later one.
  uint64_t hold_from = kNever;
  uint64_t closes_up_to = kNever;  // behind a gate, chunks close this round and earlier ones
  uint32_t attached_end = 0;       // one past the highest rank that was ever attached

 private:
  size_t at(uint32_t index, uint32_t word) const { return size_t{index} * words_ + word; }
  bool bit(const std::vector<uint64_t>& bits, uint32_t rank, uint32_t index) const {
    return (bits[at(index, rank / 64)] >> (rank % 64)) & 1;
  }
  void set_in_round(uint32_t rank, uint32_t index, bool yes);
  void set_interest(uint32_t rank, std::span<const ChunkInterest> interest);
  uint32_t idle_in_round(uint32_t index) const;
  void count_expected();

  std::vector<CoreChunk> chunks_;
  std::vector<CoreRank> ranks_;
  const uint32_t words_;
  std::vector<uint64_t> arrived_;     // [chunk][words_]
  std::vector<uint64_t> null_;        // [chunk][words_]
  std::vector<uint64_t> in_round_;    // [chunk][words_], the chunk's; idle ones as well
  std::vector<uint64_t> idle_;        // [chunk][words_]
  std::vector<uint64_t> unread_;      // [chunk][words_]
  std::vector<uint64_t> unheard_;     // [chunk][words_]
  std::vector<uint64_t> follows_to_;  // [chunk]
  static constexpr uint32_t kCounted = 0xffff;
  // [chunk]: their number, and above it 1 + a rack that left out all of its own. Empty: ranks are
  // not racks.
  std::vector<uint32_t> participants_;
  std::vector<uint32_t> queue_first_;    // where each queue's chunks begin in chunks_, and the end
  std::vector<QueueCounters> counters_;  // per queue
  uint64_t chunks_completed_ = 0;
  uint32_t expected_count_ = 0;
  uint32_t selective_ = 0;  // ranks
  uint64_t all_from_ = 0;   // from this round on, all of them are
  bool settled_ = false;
};

inline void ChunkTable::mark(uint32_t rank, uint32_t index, bool null) {
  CoreChunk& chunk = chunks_[index];
  const uint64_t bit = uint64_t{1} << (rank % 64);
  arrived_[at(index, rank / 64)] |= bit;
  if (null) null_[at(index, rank / 64)] |= bit;
  if (!null) counters_[chunk.queue].bytes_in += chunk.sent_bytes(ranks_[rank].slots);
  ++chunk.arrived;
  --chunk.missing;
  ++ranks_[rank].open;
}

static_assert(sizeof(CoreChunk) == 64, "a cache line");
static_assert(kMaxElements < uint64_t{1} << 43 && kMaxTileColumns < 1u << 20 &&
                  kMaxRankLimit < 1u << 20 && kMaxRowsLimit < 1u << 20,
              "a chunk's numbers have as many bits");
static_assert(kMaxRanks <= 0xffff, "ranks are counted in 16 bits");

}  // namespace phub
