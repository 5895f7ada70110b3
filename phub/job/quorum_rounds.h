// Ends the rounds of a job with a quorum when their grace is over (core/quorum.h), and writes into
// the job's log which ranks were late. Control thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phub/job/job.h"
#include "phub/job/membership.h"
#include "phub/job/remarks.h"

namespace phub {

class QuorumRounds {
 public:
  // A rank that is late for more rounds in a row is lost: the messages tell 256 rounds apart.
  static constexpr uint64_t kMostLateRounds = 100;

  // All of these outlive this.
  QuorumRounds(Job& job, Membership& membership, Remarks& remarks);

  void is_there(uint64_t round, uint64_t now_ms);  // a core says that a quorum has sent the round
  // All cores are held, and these ranks are about to be lost: without them it may be there no more.
  void lose(std::span<const Boundary::Lost> lost);
  void tick(uint64_t now_ms);
  uint64_t due_ms() const { return due_ms_; }  // when tick() has something to do; kNever: never
  // How many rounds in a row the rank has been late, up to the one that is complete; 0: it was not.
  uint64_t late_rounds(uint32_t rank) const;

 private:
  struct Late {
    uint32_t incarnation = 0;
    uint64_t first = 0, last = 0;  // rounds
  };
  std::vector<uint64_t> expected_in(uint64_t round) const;
  void note_late(uint32_t rank, uint64_t round);
  uint64_t grace_ms();

  Job& job_;
  Membership& membership_;
  Remarks& remarks_;
  uint64_t told_grace_ms_ = 0;  // in a remark; 0: there is none
  uint64_t due_ms_ = kNever;
  uint64_t due_round_ = 0;  // that is decided then
  std::vector<Late> late_;  // by rank: the latest rounds in a row; 0: there are none
};

}  // namespace phub
