// Makes jobs: plans them over the boxes that are there, holds them against quotas and the budget,
// takes their memory, and loads the checkpoint that a job goes on from.
//
// The builder's thread calls everything here, but for the constructor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/running_job.h"
#include "phub/job/switched.h"
#include "phub/machine.h"
#include "phub/quotas.h"
#include "phub/server_trace.h"
#include "phub/take_over.h"

namespace phub {

// The options of a server about making its jobs.
struct JobMakerOptions {
  kernels::Store store = kernels::kDefaultStore;
  uint32_t kept_checkpoints = 0;                // checkpoints kept of each job
  bool has_parent = false;                      // this box is a rack
  std::string standby_of = {};                  // the source of this box; "": there is none
  std::optional<SwitchOptions> through_switch;  // the adding switch of this rack; nullopt: none
};

class JobMaker {
 public:
  // All of these outlive this; nothing is traced while `trace` is null.
  JobMaker(JobMakerOptions options, Machine& machine, JobHost& host,
           const std::unique_ptr<ServerTrace>& trace)
      : options_(std::move(options)),
        machine_(machine),
        host_(host),
        trace_(trace),
        take_over_(options_.standby_of) {}

  struct Order {
    const JoinRequest& join;        // the first
    const Quota& quota;             // its caller's, which creates the job
    std::shared_ptr<JobSpec> spec;  // complete; the rows of matrices' chunks are added
    const numa::Topology& topology;
    const std::vector<ShardBox>& shards;  // those that are there
    std::shared_ptr<Uplink> uplink;       // a rack's, which has joined; null: there is no parent
    std::shared_ptr<Uplink> standby;      // likewise at the standby; null: there is none
  };
  // `passed_over`: lines for the log, about checkpoints or a switch that cannot be used, and where
  // chunks lie. Throws Error if the job cannot be made; then none of its memory is left.
  std::shared_ptr<RunningJob> make(const Order& order, std::vector<std::string>& passed_over);
  // The job is about to be freed: its share of cores, NICs and quotas is free.
  void forget(const Job& job);

 private:
  Plan plan_for(const Order& order, const Transport& transport, std::vector<ShardBox>& shards,
                const Layout* above, bool may_go_home = true) const;
  std::optional<Manifest> newest_checkpoint(const JoinRequest& request, const JobSpec& spec,
                                            std::vector<std::string>& passed_over);
  std::optional<SwitchedJob> switched(const JobSpec& spec, const Plan& plan,
                                      const Transport& transport, const Manifest* saved,
                                      std::vector<std::string>& passed_over);
  Quotas::Needs needs_of(const JobSpec& spec, const Plan& plan, const NodeMemory& memory) const;

  const JobMakerOptions options_;
  Machine& machine_;
  JobHost& host_;
  const std::unique_ptr<ServerTrace>& trace_;
  // The load of each job that has memory on cores and NICs per round.
  struct Load {
    std::vector<uint64_t> shards;  // the second box of the plan, and further ones
    std::vector<PlanLoad> of_plan;
  };
  std::map<const Job*, Load> loads_;
  Quotas quotas_;  // the needs of each creator's jobs
  TakeOver take_over_;
};

}  // namespace phub
