// Records of jobs that have ended, for later questions: their logs, how they ended, and why ranks
// were lost before. Control thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "phub/job/membership_log.h"
#include "phub/job/memory.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

struct EndedJob {
  struct Member {  // the last incarnation of a rank
    uint32_t incarnation = 0;
    std::string ticket;  // empty: no process has joined as this rank
    std::string lost;    // the reason of its loss before the end; empty: it was not lost
  };
  std::string name;
  std::optional<MembershipLog> log;  // nullopt: it made room for others
  std::vector<Member> members;       // by rank; none: they made room, or were kept for kKeptMs
  ErrorCode error_code = ErrorCode::kInternal;
  std::string error;  // empty: it ended well
  uint64_t ended_ms = 0;
};

class EndedJobs {
 public:
  static constexpr size_t kMostJobs = 64;
  static constexpr uint64_t kKeptMs = uint64_t{24} * 3600 * 1000;  // members

  void add(EndedJob job);
  // If this was a member of an ended job, throws the fate of the member and its job.
  void refuse_if_member(const Credential& who) const;
  // Throws Error(kNotFound), as no job of this name runs; the message says how the last one ended.
  [[noreturn]] void refuse(const std::string& job);
  std::string not_found(const std::string& job);       // the same, as a message
  LogPage log(const std::string& job, uint64_t from);  // throws Error(kNotFound)
  // Drops logs and members, those of the oldest job first, until the rest and the memory of running
  // jobs fit the budget.
  void make_room(const MemoryBudget& budget);
  void tick(uint64_t now);  // drops members after kKeptMs

 private:
  static uint64_t bytes_of(const EndedJob& job);
  EndedJob* latest(const std::string& name);

  std::deque<EndedJob> jobs_;  // the oldest is first
  uint64_t kept_ = 0;          // bytes of their logs and members
};

}  // namespace phub
