// Rounds that end with a quorum: not all ranks have to take part.
//
// No chunk closes a round before the job knows who takes part in it (quorum_gate.h): a rank takes
// part with all of its chunks, or with none. What a late rank has sent is put aside, and is its
// contribution to the next round, together with the rest once that has come; unless it is late
// again. So each rank has at most one contribution under way, and each counts once; for each round
// that it is late its weight is multiplied by the job's late_decay.
//
// This holds for each fragment of the job's keys (KeySpec::fragment) by itself: a fragment has
// rounds of its own, and ranks may be at different fragments.
//
// A rank gets results only of rounds that it took part in, as its own copy: other rounds may
// complete while it reads them. The immediate data of a result names the round, so a rank that was
// late learns how many rounds it has missed. (Decoupled DiLoCo, arXiv 2604.21428: least quorum and
// grace window. Chen et al., 2016, "Revisiting Distributed Synchronous SGD": backup workers.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "phub/core/lock_step.h"
#include "phub/core/quorum_gate.h"

namespace phub {

class Quorum : public InStep {
 public:
  // The gates outlive this. `core` is the core's index in the job; `fragment_of`: by chunk here.
  Quorum(const Stages& stages, QuorumGates& gates, uint32_t core,
         std::span<const uint32_t> fragment_of);
  static constexpr uint64_t bytes(uint64_t chunks, uint64_t ranks, uint64_t fragments) {
    return sizeof(Quorum) + fragments * (sizeof(Fragment) + ranks * sizeof(OfRank)) +
           chunks * (sizeof(uint32_t) + sizeof(uint8_t) + ranks * sizeof(uint64_t)) +
           (2 * chunks + 1) * bit_words(ranks) * sizeof(uint64_t);
  }

  Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) final;
  bool ready(uint32_t index) const final {
    const CoreChunk& chunk = stages_.table[index];
    return chunk.round <= at_fragment(index).closes_up_to &&
           may_close(chunk, chunk.arrived > 0 || chunk.vacant);
  }
  void finish(uint32_t index) override;
  uint64_t completed(uint32_t rank, uint32_t index) const final { return has_of(rank, index); }
  uint64_t taken(uint32_t /*rank*/, uint32_t /*index*/) const final { return kNever; }

  void begin(uint32_t index) override { begin_round(index, stages_.table.next_round(index, 0)); }
  uint64_t last_round(uint32_t rank, uint32_t index) const override;
  void lose(const Boundary::Lost& lost) override;
  void admit(const Boundary::Admitted& admitted) override;
  void settle(uint32_t index) override;
  bool is_fixed(uint32_t index) const override {
    const CoreChunk& chunk = stages_.table[index];
    return chunk.closed || at_fragment(index).gate->has_decided(chunk.round);
  }
  // Only a round without a quorum waits for ranks.
  bool anyone_waits(uint32_t index) const override;
  // Without those that wait at another fragment themselves.
  uint64_t lacking(uint32_t index, uint32_t word) const override;

  bool moved_on() override;
  bool is_called() const override {
    return std::ranges::any_of(fragments_,
                               [](const Fragment& of) { return is_decided(of) || may_go_on(of); });
  }
  bool arm() override {
    return std::ranges::all_of(fragments_, [this](const Fragment& of) {
      if (of.completes) return of.open > 0;  // else that is still to be said
      return !waits(of) || (of.gate->arm(core_, of.round) && !may_go_on(of));
    });
  }
  std::array<int, 2> wake_fds() const override { return {gates_.wake_fd(core_), -1}; }

 private:
  struct OfRank {
    uint32_t chunks = 0;  // of its next contribution, here
    bool sent = false;    // all of them: said to the gate
    // The latest of its contributions that was late was for the first of these rounds, and took
    // part in the second; 0: there is none.
    uint64_t late_from = 0, late_in = 0;
  };

  // A fragment of the job's keys, as far as this core has its chunks.
  struct Fragment {
    QuorumGate* gate = nullptr;
    std::vector<uint32_t> chunks;  // ascending
    std::vector<OfRank> ranks;
    uint64_t round = 1;         // that is decided next; or if `completes`, that is being completed
    uint64_t closes_up_to = 0;  // its chunks close this round and earlier ones
    bool completes = false;     // it is decided, and some chunk here may not have completed it
    uint32_t open = 0;          // if it completes: chunks that have not completed it
    bool recheck = true;        // whether the round can be decided: a boundary may have changed it
    bool held = false;          // not before other fragments: looked at again and again
  };

  uint64_t& has_of(uint32_t rank, uint32_t index) { return has_of_[at(rank, index)]; }
  uint64_t has_of(uint32_t rank, uint32_t index) const { return has_of_[at(rank, index)]; }
  size_t at(uint32_t rank, uint32_t index) const {
    return size_t{index} * stages_.table.max_ranks() + rank;
  }
  Fragment& at_fragment(uint32_t index) {
    return fragments_[fragment_of_.empty() ? 0 : fragment_of_[index]];
  }
  const Fragment& at_fragment(uint32_t index) const {
    return fragments_[fragment_of_.empty() ? 0 : fragment_of_[index]];
  }
  // For the decision on its round. A core without chunks of it has none.
  static bool waits(const Fragment& of) { return !of.completes && !of.chunks.empty(); }
  static bool is_decided(const Fragment& of) { return waits(of) && of.gate->has_decided(of.round); }
  static bool may_go_on(const Fragment& of) { return of.held && !of.gate->is_held(of.round); }
  void count_chunk(Fragment& of, uint32_t rank);
  static void forget_chunks(Fragment& of, uint32_t rank);
  bool waits_elsewhere(uint32_t rank, const Fragment& than) const;
  void find_expected(const Fragment& of);
  void check(Fragment& of);
  bool moved_on(Fragment& of);
  void take_decision(Fragment& of);
  void put_aside(const Fragment& of, uint32_t rank);
  void decay(uint32_t rank, uint32_t index);
  void begin_round(uint32_t index, uint64_t round);
  void give(uint32_t rank, uint32_t index);
  void pass_over(uint32_t index);

  QuorumGates& gates_;
  const uint32_t core_;
  std::vector<Fragment> fragments_;
  std::vector<uint8_t> fragment_of_;  // by chunk; empty: there is one fragment
  std::vector<uint64_t> has_of_;      // [chunk][rank]: the round of its latest result; kNever: none
  std::vector<uint64_t> expected_;    // a bit for each rank: in the round that is looked at
  RankBits aside_, null_aside_;
};

inline Way::Verdict Quorum::accept(uint32_t rank, uint32_t index, const Imm& imm) {
  ChunkTable& table = stages_.table;
  const CoreChunk& chunk = table[index];
  const uint64_t has = has_of(rank, index);
  if (chunk.round == 0 || has == kNever) return Verdict::kWrongRound;
  Fragment& fragment = at_fragment(index);
  if (has >= table.rank(rank).first_round) {
    const OfRank& of = fragment.ranks[rank];
    if (imm.round == low8(has == of.late_in ? of.late_from : has)) return Verdict::kComplete;
  }
  if (imm.round != low8(has + 1)) return Verdict::kWrongRound;
  if (table.has(rank, index) || aside_.has(rank, index)) return Verdict::kDuplicate;
  const bool null = imm.kind == ImmKind::kNull;
  if (table.is_in_round(rank, index)) {
    table.mark(rank, index, null);
  } else {
    aside_.set(rank, index);
    null_aside_.set_to(rank, index, null);
  }
  stages_.trace.arrival(index, chunk, has + 1, rank, chunk.arrived == 1, chunk.missing == 0);
  count_chunk(fragment, rank);
  return Verdict::kAccepted;
}

}  // namespace phub
