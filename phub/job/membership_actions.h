// The decisions of a job's membership, which the server carries out in order. Control thread.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "phub/job/decisions.h"
#include "transport/error.h"

namespace phub {

struct MembershipAction {
  enum Type {
    kHold,    // send kHold to every core
    kAdmit,   // make the memory and queue pairs of `rank`/`incarnation`, which may take its time;
              // then call admitted()
    kCommit,  // send kCommit with the boundary to every core, with what is `decided`
    kRevoke,  // close the connection of `rank` and give its memory back
    kReply,   // answer the request `token`
    kStop,    // by its policy the job is to end now: call failed() with the message
    kFail,    // the job ends with an error: code, message
    kSave,    // the last rank has left: save the job, then call end_saved()
    kSaveForRanks,  // a standby has lost its source: save the job for the source's ranks, then call
                    // end_saved()
    kEnd,           // the last rank has left, and the job is over
  };
  Type type = kHold;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t token = 0;         // kAdmit: the join's
  uint64_t first_round = 0;   // kReply to a join, or to a change: the round from which it holds
  bool send_initial = false;  // kReply to a join
  bool ok = true;             // kReply
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  Decisions::Placed decided;  // kCommit
  uint64_t lowest_round = 0;  // kCommit: the lowest that a chunk is in
};

class MembershipActions {
 public:
  bool empty() const { return actions_.empty(); }
  MembershipAction take() {  // the oldest. REQUIRES: !empty()
    MembershipAction action = std::move(actions_.front());
    actions_.pop_front();
    return action;
  }

  void add(MembershipAction action) { actions_.push_back(std::move(action)); }
  void reply(uint64_t token) { add({.type = MembershipAction::kReply, .token = token}); }
  void refuse(uint64_t token, ErrorCode code, const std::string& message) {
    add({.type = MembershipAction::kReply,
         .token = token,
         .ok = false,
         .code = code,
         .message = message});
  }

 private:
  std::deque<MembershipAction> actions_;
};

}  // namespace phub
