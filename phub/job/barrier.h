// The barrier of a job's ranks: the calls of those that wait in it. Part of Membership; no threads.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "phub/job/membership_actions.h"
#include "transport/error.h"

namespace phub {

class Barrier {
 public:
  explicit Barrier(MembershipActions& actions) : actions_(actions) {}  // outlives this

  void enter(uint64_t token, uint32_t rank);
  void leave(uint32_t rank);  // its connection has ended; it no longer waits here, if it did
  void lose(uint32_t rank, const std::string& why);  // likewise: the rank is gone
  bool empty() const { return waiting_.empty(); }
  bool has(uint32_t rank) const { return waiting_.contains(rank); }
  void open();                                             // answers all that wait
  void close(ErrorCode code, const std::string& message);  // likewise, with this error

 private:
  void refuse(uint32_t rank, ErrorCode code, const std::string& message);

  MembershipActions& actions_;
  std::map<uint32_t, uint64_t> waiting_;  // rank → token
};

}  // namespace phub
