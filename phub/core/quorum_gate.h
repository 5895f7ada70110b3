// Who takes part in the rounds of a job with a quorum (quorum.h): what its cores share.
//
// Each fragment of the job's keys (KeySpec::fragment) has a gate, and rounds of its own. A rank has
// sent a round of it when every core has all of its chunks of that round. A round is decided once
// all expected ranks have sent it, by the core that notices; or once the control thread finds that
// a quorum has sent it and its grace is over. The other ranks are then late. A round can be decided
// when every core has completed the fragment's round before it; if the job says so, that of all
// fragments: then they are at most a round apart.
//
// It is made with the job by the control thread; a core that has the job calls each function,
// unless it says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "phub/core/core_bells.h"
#include "phub/core/quorum_times.h"

namespace phub {

class QuorumGates;

class QuorumGate {
 public:
  // `quorum`: ranks. `with_chunks`: cores that have some of the fragment, at least one. The first
  // round to be decided is `first_round`. `bells`, which are the same for all gates, outlive it.
  // `beside`: the gates of all fragments, which decide a round before any decides the next one;
  // null: they do not depend on each other.
  QuorumGate(CoreBells& bells, uint32_t with_chunks, uint32_t max_ranks, uint32_t quorum,
             uint64_t first_round, const QuorumGates* beside = nullptr);
  static constexpr uint64_t bytes(uint64_t ranks) {
    return sizeof(QuorumGate) + sizeof(QuorumTimes) + ranks * sizeof(std::atomic<uint32_t>) +
           (ranks + 63) / 64 * sizeof(uint64_t);
  }
  uint32_t quorum() const { return quorum_; }
  // REQUIRES: no core has the job yet. Without it times() is null, and nobody measures.
  void measure() { times_ = std::make_unique<QuorumTimes>(); }
  QuorumTimes* times() const { return times_.get(); }

  // The calling core has all chunks of the rank's next contribution. Returns whether all cores have
  // theirs now.
  bool sent_here(uint32_t rank);
  // It takes that back: the contribution took part in a round, or the rank was lost.
  void took_here(uint32_t rank);
  // The calling core has completed all its chunks of the round. True: it was the last one, so the
  // next round can be decided.
  bool completed_here(uint64_t round);

  // A set of ranks has a bit for each: r % 64 of word r / 64. Any thread:
  uint64_t collecting() const { return collecting_.load(std::memory_order_seq_cst); }
  bool has_decided(uint64_t round) const {
    return decided_.load(std::memory_order_seq_cst) >= round;
  }
  bool is_held(uint64_t round) const;  // some fragment has not completed the round before
  bool has_sent(uint32_t rank) const {
    return cores_with_[rank].load(std::memory_order_seq_cst) == cores_;
  }
  uint32_t senders_among(std::span<const uint64_t> ranks) const;  // how many have sent the round
  // A quorum of the expected ranks has sent the round. say_is_there() returns whether it is the
  // first call for that round.
  bool is_there(uint64_t round) const { return there_.load(std::memory_order_relaxed) >= round; }
  bool say_is_there(uint64_t round);
  // Control thread, while all cores are held: it is not, as a rank is lost.
  void say_is_not_there(uint64_t round) { there_.store(round - 1, std::memory_order_relaxed); }
  // Decides the round if at least `least` of the expected ranks have sent it; the others of them
  // are late. False: too few have, or somebody else decides, or it cannot be decided yet. Cores
  // that sleep are woken, but for `but_core`. `late`: gets the late ranks; null: is not used.
  bool decide(uint64_t round, std::span<const uint64_t> expected, uint32_t least,
              uint32_t but_core = CoreBells::kNoCore, std::vector<uint64_t>* late = nullptr);
  // In the round that was decided last. REQUIRES: the calling core has not completed it.
  bool is_late(uint32_t rank) const { return (late_[rank / 64] >> (rank % 64) & 1) != 0; }

  // Before the core sleeps: the decision on the round will wake it. Returns false if it is there.
  bool arm(uint32_t core, uint64_t round) {
    bells_.arm(core);
    return !has_decided(round);
  }

 private:
  const uint32_t cores_;  // that have chunks
  const uint32_t quorum_;
  const std::unique_ptr<std::atomic<uint32_t>[]> cores_with_;  // by rank: that have all its chunks
  std::vector<uint64_t> late_;                                 // guarded by decided_
  CoreBells& bells_;
  const QuorumGates* const beside_;
  std::unique_ptr<QuorumTimes> times_;
  alignas(64) std::atomic<uint32_t> open_;  // cores that have not completed the decided round
  alignas(64) std::atomic<uint64_t> collecting_;
  std::atomic<uint64_t> claimed_;
  std::atomic<uint64_t> there_;
  alignas(64) std::atomic<uint64_t> decided_;
};

// Those of a job, by fragment.
class QuorumGates {
 public:
  // `with_chunks`: by fragment. `together`: no fragment's round is decided before all have
  // completed the one before.
  QuorumGates(uint32_t cores, std::span<const uint32_t> with_chunks, uint32_t max_ranks,
              uint32_t quorum, uint64_t first_round, bool together = false);
  static constexpr uint64_t bytes(uint64_t cores, uint64_t ranks, uint64_t fragments) {
    return sizeof(QuorumGates) + CoreBells::bytes(cores) + fragments * QuorumGate::bytes(ranks);
  }
  uint32_t size() const { return static_cast<uint32_t>(gates_.size()); }
  QuorumGate& operator[](uint32_t fragment) { return *gates_[fragment]; }
  const QuorumGate& operator[](uint32_t fragment) const { return *gates_[fragment]; }
  int wake_fd(uint32_t core) const { return bells_.fd(core); }
  bool go_together() const { return together_; }
  uint64_t lowest() const;  // the round that is decided next of those that have come least far

 private:
  const bool together_;
  CoreBells bells_;
  std::vector<std::unique_ptr<QuorumGate>> gates_;
};

}  // namespace phub
