// The joins of a job that are not answered yet. A join waits until its predecessor is gone from
// every core; then until its memory and queue pairs are made, which holds up no rank; then for a
// boundary. Part of Membership; no threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "phub/job/membership_actions.h"
#include "phub/job/rank_table.h"
#include "transport/error.h"

namespace phub {

class Joins {
 public:
  struct Join {
    uint64_t token;
    uint32_t rank;
    enum { kWaiting, kAdmitting, kAdmitted } stage = kWaiting;
    RankRecord::Stage before = RankRecord::Stage::kAbsent;  // the rank's, if its admission fails
  };
  Joins(RankTable& ranks, MembershipActions& actions) : ranks_(ranks), actions_(actions) {}

  void add(uint64_t token, uint32_t rank);
  void admit_waiting();          // those whose predecessors are gone
  bool admitted(uint32_t rank);  // returns false if it is not being admitted
  void failed(uint32_t rank, const std::string& why);
  bool wait() const { return !waiting_.empty(); }

  // A boundary begins: it takes those that are admitted. Returns false if there are none.
  bool begin();
  std::span<const Join> current() const { return current_; }  // of the boundary under way
  void end() { current_.clear(); }                            // they are answered
  void close(ErrorCode code, const std::string& message);     // answers all with this error

 private:
  std::vector<Join>::iterator admitting(uint32_t rank);

  RankTable& ranks_;
  MembershipActions& actions_;
  std::vector<Join> waiting_;
  std::vector<Join> current_;
};

}  // namespace phub
