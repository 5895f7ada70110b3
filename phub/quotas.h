// The needs of each creator's jobs, held against the quota of the token that they were created
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
  using BytesOfJobs = std::map<std::string, uint64_t>;
  struct Needs {
    Quota amounts;
    std::set<uint32_t> cpus =
        {};  // the CPUs of its plan's cores, which jobs share; amounts has their number
  };

  // Whether `creator` may create a job that needs this. `kept`: the bytes of checkpoints on the
  // disk, by job, of jobs that run and that do not; asked for only if there is a limit. A running
  // job counts with its needs, or with the bytes that are there if these are more. A core counts
  // once, however many jobs have it. Throws Error(kFull) that names the free rest, and the jobs
  // that have the others.
  void check(const Caller& creator, const Quota& quota, const std::string& job, const Needs& needed,
             const std::function<BytesOfJobs()>& kept) const;
  // `creator`: its token's id.
  void add(const Job* job, const std::string& creator, const std::string& name, Needs has);
  std::set<uint32_t> cpus_of(const std::string& creator) const;
  void remove(const Job* job) { held_.erase(job); }

 private:
  struct Held {
    std::string creator;  // its token's id
    std::string name;
    Needs has;
  };
  std::map<const Job*, Held> held_;
};

}  // namespace phub
