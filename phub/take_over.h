// What a standby (job/standby.h) makes jobs of: of its source's, and, when it has lost that, of
// what it has saved. Builder's thread.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "phub/checkpoint/manifest.h"
#include "transport/control/messages.h"

namespace phub {

// Throws Error(kUnauthorized): the job of this checkpoint is not the caller's to go on with.
void check_owner(const JoinRequest& request, const Manifest& saved);

class TakeOver {
 public:
  // The address of the source; "": this box is no standby.
  explicit TakeOver(std::string source) : source_(std::move(source)) {}

  bool is_standby() const { return !source_.empty(); }
  // A standby makes no jobs but those of its source, until it has gone on with one. Throws
  // Error(kUnavailable).
  void check_makes_jobs(const JobSpec& spec) const;
  // A join asks for a job that a standby has saved. Gives `saved` the spec of the source's job,
  // which is that of the join. Throws Error(kUnavailable) as long as the source may go on, or as a
  // box asks in place of a rank; kMismatch, kUnauthorized.
  void check(const JoinRequest& request, const JobSpec& spec, Manifest& saved);
  // A job of this name goes on here from a checkpoint.
  void goes_on(const std::string& job);

 private:
  void check_majority(const JoinRequest& request, const Manifest& saved);

  const std::string source_;
  bool has_gone_on_ = false;
  // By job: of a source that is lost, the epoch, and which of its ranks have joined its standby,
  // with the incarnations that they had. At most its members.
  using Joined = std::set<std::pair<uint32_t, uint32_t>>;
  std::map<std::string, std::pair<uint64_t, Joined>> joined_;
};

}  // namespace phub
