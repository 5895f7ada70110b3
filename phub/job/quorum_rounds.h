// Ends the rounds of a job with a quorum when their grace is over (core/quorum.h), each fragment's
// by themselves, and writes into the job's log which ranks were late. Control thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phub/job/job.h"
#include "phub/job/membership.h"
#include "phub/job/quorum_standstill.h"
#include "phub/job/remarks.h"

namespace phub {

class QuorumRounds {
 public:
  // A rank that is late for more rounds of a fragment in a row is lost: the messages tell 256
  // rounds apart.
  static constexpr uint64_t kMostLateRounds = 100;

  // All of these outlive this.
  QuorumRounds(Job& job, Membership& membership, Remarks& remarks);

  void is_there(uint64_t now_ms);  // a core says that a quorum has sent a round of some fragment
  // All cores are held, and these ranks are about to be lost: without them it may be there no more.
  void lose(std::span<const Boundary::Lost> lost);
  void tick(uint64_t now_ms);
  uint64_t due_ms() const;  // when tick() has something to do; kNever: never
  // Now and then: lets ranks go on that wait for each other at different fragments.
  void end_standstill(uint64_t now_ms);
  // How many rounds in a row the rank has been late, up to the one that is complete: those of the
  // fragment in which it is late the longest; 0: it was not.
  uint64_t late_rounds(uint32_t rank) const;

 private:
  struct Late {
    uint32_t incarnation = 0;
    uint64_t first = 0, last = 0;  // rounds
  };
  // The end of a fragment's grace.
  struct Due {
    uint64_t ms = kNever;
    uint64_t round = 0;  // 0: none, or its quorum is there no more
  };
  std::vector<uint64_t> expected_in(uint64_t round) const;
  bool may_decide() const;
  void end_grace(uint32_t fragment, uint64_t now_ms);
  bool decide(uint32_t fragment, uint64_t round, uint32_t least);
  void note_late(uint32_t fragment, uint32_t rank, uint64_t round);
  uint64_t late_rounds(uint32_t fragment, uint32_t rank) const;
  uint64_t grace_ms();

  Job& job_;
  QuorumGates& gates_;
  Membership& membership_;
  Remarks& remarks_;
  QuorumStandstill standstill_;
  uint64_t told_grace_ms_ = 0;           // in a remark; 0: there is none
  std::vector<Due> due_;                 // by fragment
  std::vector<std::vector<Late>> late_;  // by fragment and rank: the latest rounds in a row
};

}  // namespace phub
