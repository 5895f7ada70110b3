// The table of a core's chunks, and of the ranks: which are expected at a chunk, and which have
// arrived.
//
// It knows nothing of transports or sums. Nothing allocates after construction.
//
// A chunk and the words of arrived ranks are hot. The words of expected ranks are used by
// boundaries and probes, and in the rounds before the first round of the rank that joined last.
//
// A rank may be *idle* at a chunk: it neither writes nor reads it (transport/control/interest.h).
// It takes part in the chunk's rounds all the same, as if it had sent a null, but nobody waits for
// it. A chunk at which all ranks of a round are idle *follows*: only a boundary makes it go on, and
// says up to which round. The chunk then makes the steps of those rounds, one after another, with a
// gradient of zero.
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
  uint64_t round = 0;  // in progress; 0: it awaits initial parameters
  // The offsets are in the box's arrays and in the worker's results, in elements. The bits that
  // they leave free describe the compact form of a matrix's gradient (SlotShape).
  uint64_t offset : 44 = 0;
  uint64_t columns : 20 = 0;
  uint64_t worker_offset : 44 = 0;
  uint64_t limit : 20 = 0;
  int64_t step_offset = 0;        // its optimizer's step in a round is the round plus this
  uint64_t slot_offset : 48 = 0;  // in the slots of a rank, bytes
  kernels::DType dtype = kernels::DType::kF32;  // the type of its gradients
  uint8_t initial_parts = 0;                    // parts of the initial parameters that have arrived
  uint32_t elements = 0;
  uint32_t id = 0;  // in the plan
  int32_t priority = 0;
  uint16_t expected = 0;  // ranks in this round, idle ones excluded (lock-step only)
  uint16_t missing = 0;   // expected ranks that have not arrived
  uint16_t arrived = 0;   // contributions that have arrived, null ones included
  uint16_t hyper_class = 0;
  uint16_t queue = 0;       // index among the core's queues
  bool closed : 1 = false;  // this round: its result is pending
  bool unused : 1 = false;  // this round: no rank has sent a gradient, so none is applied
  bool vacant : 1 = false;  // this round: no rank takes part, but it completes all the same
  bool lazy : 1 = false;    // the optimizer steps only the rows that some rank has sent
  bool skips : 1 = true;    // a round without a gradient may make no step (JobSpec::unused)
  bool same : 1 = false;    // the latest result equals that of the round before (KeySpec::lazy)
  kernels::SlotForm form : 2 = kernels::SlotForm::kElements;
  kernels::ValueType value : 2 = kernels::ValueType::kF32;  // the type of a fold's values
  kernels::Operation operation : 3 = kernels::Operation::kNone;

  // The shape of a gradient.
  kernels::SlotShape slot() const { return {elements, dtype, form, columns, limit, fold()}; }
  kernels::Fold fold() const { return {value, operation}; }
  uint64_t slot_bytes() const { return kernels::slot_bytes(slot()); }
  // The bytes of the slot's present content on the wire.
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
  uint32_t open = 0;     // its contributions to chunks that are not complete
  uint32_t unheard = 0;  // chunks that have heard nothing from it since it reconnected
  bool attached = false;
  bool broken = false;     // its connection is; ignored until a boundary or a reconnection
  bool selective = false;  // there are chunks that it does not write, or not read
};

class ChunkTable {
 public:
  // `chunks` come queue after queue, those of a queue in the order of their index in it. The ranks
  // in `expected` take part from round 1 on.
  ChunkTable(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
             std::span<const uint32_t> expected);

  // The bytes that a table holds beside itself, mostly chunks and their words of ranks.
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
  uint32_t index_of(const CoreChunk& chunk) const {  // REQUIRES: it is in this table
    return static_cast<uint32_t>(&chunk - chunks_.data());
  }
  uint32_t max_ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t words() const { return words_; }  // each for 64 ranks

  // Returns kNoChunk if the queue has no such chunk.
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
  // Does the same without null contributions.
  template <typename Visit>
  void for_each_gradient(uint32_t index, const Visit& visit) const {
    for (uint32_t w = 0; w < words_; ++w) {
      for_each_bit(arrived_[at(index, w)] & ~null_[at(index, w)], w, visit);
    }
  }

  // After a reconnection a rank sends its unanswered contributions again. Until that to a chunk is
  // here, no result of the chunk goes to the rank: its next contribution could overtake the
  // repeated one.
  void reconnected(uint32_t rank);
  void joined(uint32_t rank);  // none of its messages is under way
  bool is_heard(uint32_t rank, uint32_t index) const {
    return ranks_[rank].unheard == 0 || !bit(unheard_, rank, index);
  }
  void hear(uint32_t rank, uint32_t index) {
    if (is_heard(rank, index)) return;
    unheard_[at(index, rank / 64)] &= ~(uint64_t{1} << (rank % 64));
    --ranks_[rank].unheard;
  }
  // The number of the training's ranks that took part in the arrived contributions. A rack counts
  // as many ranks as it says after count_rack_ranks(); without that call every rank counts as one.
  void count_rack_ranks() { participants_.resize(chunks_.size()); }
  static constexpr uint64_t rack_bytes(uint64_t chunks) { return chunks * sizeof(uint32_t); }
  void add_participants(uint32_t index, uint32_t rack, uint32_t count) {
    uint32_t& all = participants_[index];
    all = count == kNoneLeft ? (rack + 1) << 16 | (all & kCounted) : all + count;
  }
  uint32_t participants(uint32_t index) const {
    if (!participants_.empty()) return participants_[index] & kCounted;
    const uint32_t ranks = chunks_[index].arrived + (selective_ > 0 ? idle_in_round(index) : 0);
    return ranks == 0 && follows(index) ? 1 : ranks;  // the idle ranks may have left since
  }
  // The rack that said that it had to leave out all of its ranks; nullopt if there is none.
  std::optional<uint32_t> left_out_rack(uint32_t index) const {
    if (participants_.empty() || participants_[index] >> 16 == 0) return {};
    return (participants_[index] >> 16) - 1;
  }

  // Rounds.
  void begin_round(uint32_t index, uint64_t round);
  // The first round after `round` in which some rank is expected at the chunk. If all ranks of a
  // round are gone and the others begin later, no rank will ever take part in it: such rounds are
  // skipped, and change nothing.
  uint64_t next_round(uint32_t index, uint64_t round) const;
  void count_completed(uint32_t index, uint64_t rounds = 1) {
    chunks_completed_ += rounds;
    counters_[chunks_[index].queue].chunks += rounds;
  }

  // Sets from which round on the rank is expected; kNever means not at all. `interest` is by chunk
  // of the job; empty means everything. Called at a boundary.
  void expect(uint32_t rank, uint64_t first_round, std::span<const ChunkInterest> interest = {});
  uint32_t expected_count() const { return expected_count_; }  // in any round
  // A bit for each of 64 ranks: it is expected in the chunk's round and has not arrived.
  uint64_t lacking(uint32_t index, uint32_t word) const {
    return in_round_[at(index, word)] & ~idle_[at(index, word)] & ~arrived_[at(index, word)];
  }
  uint64_t arrived_word(uint32_t index, uint32_t word) const { return arrived_[at(index, word)]; }
  // Whether every chunk is past the latest change of the expected ranks.
  bool settled();

  bool any_selective() const { return selective_ > 0; }
  bool is_idle(uint32_t rank, uint32_t index) const {
    return ranks_[rank].selective && bit(idle_, rank, index);
  }
  bool reads(uint32_t rank, uint32_t index) const {
    return !ranks_[rank].selective || !bit(unread_, rank, index);
  }
  // The chunk's round waits for no rank, and nothing has arrived.
  bool is_left_alone(uint32_t index) const {
    const CoreChunk& chunk = chunks_[index];
    return chunk.expected == 0 && chunk.arrived == 0 &&
           (follows(index) || (selective_ > 0 && idle_in_round(index) > 0));
  }
  // At a boundary: makes a chunk that is left alone go on to this round, or to the next one in
  // which some rank is expected. A rank that is idle in its round takes part in all of these
  // rounds, even if it is lost next. `after` means that the boundary's ranks are lost and admitted
  // already; before, the chunk goes no further than `round`.
  void follow(uint32_t index, uint64_t round, bool after);
  // The chunk completes its round without any contribution.
  bool follows(uint32_t index) const {
    const CoreChunk& chunk = chunks_[index];
    return chunk.expected == 0 && chunk.arrived == 0 && chunk.round > 0 &&
           chunk.round < follows_to_[index];
  }
  // The ranks of the rounds before this one are final.
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
  std::vector<uint64_t> in_round_;    // [chunk][words_], in the chunk's round, idle ones included
  std::vector<uint64_t> idle_;        // [chunk][words_]
  std::vector<uint64_t> unread_;      // [chunk][words_]
  std::vector<uint64_t> unheard_;     // [chunk][words_]
  std::vector<uint64_t> follows_to_;  // [chunk]
  static constexpr uint32_t kCounted = 0xffff;
  // [chunk]: the number of participants, and in the bits above it 1 + a rack that left out all of
  // its ranks. Empty if ranks are not racks.
  std::vector<uint32_t> participants_;
  std::vector<uint32_t> queue_first_;    // where each queue's chunks begin in chunks_, and the end
  std::vector<QueueCounters> counters_;  // per queue
  uint64_t chunks_completed_ = 0;
  uint32_t expected_count_ = 0;
  uint32_t selective_ = 0;  // ranks
  uint64_t all_from_ = 0;   // from this round on all expected ranks take part
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
