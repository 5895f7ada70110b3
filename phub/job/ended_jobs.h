// What is still asked about jobs that are gone: their logs, and why they ended. Control thread
// only.
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
    std::string ticket;
  };
  std::string name;
  std::optional<MembershipLog> log;  // nothing: it made room for others
  std::vector<Member> members;       // by rank
  ErrorCode error_code = ErrorCode::kInternal;
  std::string error;  // empty: it ended well
};

class EndedJobs {
 public:
  static constexpr size_t kMostJobs = 64;

  void add(EndedJob job);
  // Throws what the job of this member ended with, if it was one.
  void refuse_if_member(const Credential& who) const;
  LogPage log(const std::string& job, uint64_t from);  // throws Error(kNotFound)
  // Drops logs, the oldest first, until they and what running jobs hold fit the budget.
  void make_room(const MemoryBudget& budget);

 private:
  static uint64_t bytes_of(const EndedJob& job) { return job.log ? job.log->bytes() : 0; }

  std::deque<EndedJob> jobs_;
  uint64_t kept_ = 0;  // bytes of their logs
};

}  // namespace phub
