// What the jobs of each creator have, held against the quota of the token that they were created
// with. One thread: the builder's, which makes and frees jobs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "phub/control/tokens.h"
#include "transport/control/messages.h"

namespace phub {

class Job;

class Quotas {
 public:
  using Names = std::set<std::string>;

  // Whether `creator` may create a job that needs this. `kept`: the bytes of checkpoints that the
  // creator has beside those of the jobs named, which `needed` of these covers; asked for only if
  // there is a limit. Throws Error(kFull) that says what is free, and which jobs have the rest.
  void check(const Caller& creator, const Quota& quota, const std::string& job, const Quota& needed,
             const std::function<uint64_t(const Names& running)>& kept) const;
  void add(const Job* job, const Caller& creator, const std::string& name, const Quota& has);
  void remove(const Job* job) { held_.erase(job); }

 private:
  struct Held {
    std::string creator;  // its token's id
    std::string name;
    Quota has;
  };
  std::map<const Job*, Held> held_;
};

}  // namespace phub
