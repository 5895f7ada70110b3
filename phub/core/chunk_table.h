// The table of a core's chunks, and of the ranks: which are expected at a chunk, and which have
// arrived.
//
// It knows nothing of transports or sums. Nothing allocates after construction. It has three
// layers: the chunks (queued_chunks.h), the contributions to them (contributions.h), and here their
// rounds, with the ranks that take part.
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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "phub/core/contributions.h"
#include "transport/control/interest.h"
#include "transport/format_schedule.h"

namespace phub {

class ChunkTable : public Contributions {
 public:
  // The ranks in `expected` take part from round 1 on. `schedules`: CoreChunk::schedule; they
  // outlive the table.
  ChunkTable(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
             std::span<const uint32_t> expected, GradientPlaces places = {},
             std::span<const FormatSchedule> schedules = {});

  // The bytes that a table holds beside itself, mostly chunks and their words of ranks.
  static constexpr uint64_t bytes(uint64_t chunks, uint64_t queues, uint64_t max_ranks) {
    return chunks * (sizeof(CoreChunk) + (7 * bit_words(max_ranks) + 1) * sizeof(uint64_t)) +
           max_ranks * sizeof(CoreRank) + queues * (sizeof(QueueCounters) + sizeof(uint32_t));
  }

  // The number of the training's ranks that took part in the arrived contributions. A rack counts
  // as many ranks as it says after count_rack_ranks(); without that call every rank counts as one.
  void count_rack_ranks() { participants_.resize(size()); }
  static constexpr uint64_t rack_bytes(uint64_t chunks) { return chunks * sizeof(uint32_t); }
  void add_participants(uint32_t index, uint32_t rack, uint32_t count) {
    uint32_t& all = participants_[index];
    all = count == kNoneLeft ? (rack + 1) << 16 | (all & kCounted) : all + count;
  }
  uint32_t participants(uint32_t index) const {
    if (!participants_.empty()) return participants_[index] & kCounted;
    const CoreChunk& chunk = (*this)[index];
    const uint32_t ranks = chunk.arrived + (selective_ > 0 ? idle_in_round(index) : 0);
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
  uint64_t round_with_ranks(uint32_t index, uint64_t round) const;
  // That round; or the very next one, if every round is made.
  uint64_t next_round(uint32_t index, uint64_t round) const {
    return every_round ? round + 1 : round_with_ranks(index, round);
  }

  // The bytes of a slot with a gradient of that round, which is the chunk's or an earlier one.
  uint64_t slot_bytes(const CoreChunk& chunk, uint64_t round) const {
    return chunk.schedule == 0 ? chunk.slot_bytes()
                               : schedule_of(chunk).at(round).bytes(chunk.elements);
  }
  // Those that a slot has room for, which tell the parts of initial parameters.
  uint64_t most_slot_bytes(const CoreChunk& chunk) const {
    return chunk.schedule == 0 ? chunk.slot_bytes()
                               : schedule_of(chunk).slot().bytes(chunk.elements);
  }

  // Sets from which round on the rank is expected; kNever means not at all. `interest` is by chunk
  // of the job; empty means everything. Called at a boundary.
  void expect(uint32_t rank, uint64_t first_round, std::span<const ChunkInterest> interest = {});
  uint32_t expected_count() const { return expected_count_; }  // in any round
  bool is_in_round(uint32_t rank, uint32_t index) const { return in_round_.has(rank, index); }
  // The rank takes no part in this round of any of these chunks, which nobody has closed, and in
  // the next one it does. REQUIRES: nothing of it has arrived for that round.
  void excuse(uint32_t rank, uint64_t round, std::span<const uint32_t> indices);
  // A bit for each of 64 ranks: it is expected in the chunk's round and has not arrived.
  uint64_t lacking(uint32_t index, uint32_t word) const {
    return in_round_.word(index, word) & ~idle_.word(index, word) & ~arrived_word(index, word);
  }
  // Whether every chunk is past the latest change of the expected ranks.
  bool settled();

  bool any_selective() const { return selective_ > 0; }
  bool is_idle(uint32_t rank, uint32_t index) const {
    return this->rank(rank).selective && idle_.has(rank, index);
  }
  bool reads(uint32_t rank, uint32_t index) const {
    return !this->rank(rank).selective || !unread_.has(rank, index);
  }
  // The latest result of a lazy key's chunk equals the one before: of all ranks in lock-step, else
  // of this rank.
  bool is_same(uint32_t rank, uint32_t index) const {
    const CoreChunk& chunk = (*this)[index];
    return chunk.lazy && (chunk.same || same_.has(rank, index));
  }
  void set_same(uint32_t rank, uint32_t index, bool yes) { same_.set_to(rank, index, yes); }
  // The chunk's round waits for no rank, and nothing has arrived.
  bool is_left_alone(uint32_t index) const {
    const CoreChunk& chunk = (*this)[index];
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
    const CoreChunk& chunk = (*this)[index];
    return chunk.expected == 0 && chunk.arrived == 0 && chunk.round > 0 &&
           chunk.round < follows_to_[index];
  }
  // The ranks of the rounds before this one are final.
  uint64_t open_round(uint32_t index) const {
    return std::max((*this)[index].round, follows_to_[index]);
  }

  // Between hold and commit of a boundary no chunk completes this round or a later one.
  uint64_t hold_from = kNever;
  bool every_round = false;        // rounds that no rank takes part in are made, and not skipped
  uint64_t closes_up_to = kNever;  // behind a gate, chunks close this round and earlier ones
  uint32_t attached_end = 0;       // one past the highest rank that was ever attached

 private:
  void set_in_round(uint32_t rank, uint32_t index, bool yes);
  void set_interest(uint32_t rank, std::span<const ChunkInterest> interest);
  uint32_t idle_in_round(uint32_t index) const;
  void count_expected();
  const FormatSchedule& schedule_of(const CoreChunk& chunk) const {
    return schedules_[chunk.schedule - 1];
  }

  RankBits in_round_;  // in the chunk's round, idle ones included
  RankBits idle_, unread_, same_;
  std::vector<uint64_t> follows_to_;  // [chunk]
  static constexpr uint32_t kCounted = 0xffff;
  // [chunk]: the number of participants, and in the bits above it 1 + a rack that left out all of
  // its ranks. Empty if ranks are not racks.
  std::vector<uint32_t> participants_;
  uint32_t expected_count_ = 0;
  uint32_t selective_ = 0;      // ranks
  uint64_t all_from_ = 0;       // from this round on all expected ranks take part,
  uint64_t excused_until_ = 0;  // but for excused ones before this round
  bool settled_ = false;
  std::span<const FormatSchedule> schedules_;
};

}  // namespace phub
