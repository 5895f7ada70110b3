// Ranks that are at different fragments of a job with a quorum, and each wait for others to come to
// theirs. Control thread.
//
// Ranks go through the fragments in one order, so those that made a quorum meet again at the next
// fragment, and one more round goes on. But if one of them is lost, or leaves, or a late rank has
// gone ahead while its contribution was under way, all ranks may wait, and no fragment has its
// quorum. Likewise if the others are in a barrier, and one that has just joined waits for the round
// before its first at a fragment that is behind. The box cannot see whether a rank waits for a
// result or still computes what it sends to another fragment; so it is a standstill when nothing
// has changed for twice as long as is usual (at least a second, at most a quarter of the job's
// progress limit). Then the lowest round ends with those that have sent it, however few, and they
// go on to meet the others; if nobody has sent any, the lowest that somebody waits for is passed
// over. Where fragments go together (QuorumGates), higher rounds wait for the lowest, which ends
// even if nobody has sent it.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "phub/core/quorum_gate.h"
#include "phub/job/barrier.h"
#include "phub/job/rank_table.h"

namespace phub {

class QuorumStandstill {
 public:
  // All of these outlive this.
  QuorumStandstill(const QuorumGates& gates, const RankTable& ranks, const Barrier& barrier,
                   uint64_t progress_limit_ms);

  // Asked again and again. The fragment whose round is to end; nullopt: there is no standstill.
  std::optional<uint32_t> look(uint64_t now_ms);

 private:
  void note(uint64_t now_ms);
  bool all_wait() const;
  bool waits(uint32_t rank) const;
  bool waits_to_begin(uint32_t rank, const QuorumGate& gate) const;
  bool is_awaited(const QuorumGate& gate) const;
  std::optional<uint32_t> lowest() const;
  uint32_t senders(const QuorumGate& gate) const;

  const QuorumGates& gates_;
  const RankTable& ranks_;
  const Barrier& barrier_;
  const uint64_t most_ms_;
  std::vector<std::pair<uint64_t, uint32_t>> latest_;  // by fragment: its round and senders
  uint64_t changed_ms_ = 0;                            // when these changed
  uint64_t usual_ms_ = 0;                              // the longest lately between two changes
};

}  // namespace phub
