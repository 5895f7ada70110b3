// The members of a job, as its changes (changes.h) make them and its membership watches them.
#pragma once

#include <cstdint>

#include "phub/job/barrier.h"
#include "phub/job/job_rounds.h"
#include "phub/job/leases.h"
#include "phub/job/loss_policy.h"
#include "phub/job/membership_actions.h"
#include "phub/job/membership_log.h"
#include "phub/job/rank_table.h"
#include "phub/job_rules.h"

namespace phub {

struct Members {
  // `spec` outlives this.
  Members(const JobSpec& job_spec, uint32_t chunks, const RankRange& served, uint32_t life)
      : spec(job_spec),
        rules(rules_of(job_spec)),
        ranks(job_spec, served, life),
        rounds(rules.initial_broadcast() ? 0 : 1),
        leases(job_spec, ranks),
        policy(job_spec, ranks, rounds),
        barrier(actions),
        log(chunks) {}
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  const JobSpec& spec;
  const JobRules rules;
  RankTable ranks;
  JobRounds rounds;
  Leases leases;
  LossPolicy policy;
  MembershipActions actions;
  Barrier barrier;
  MembershipLog log;
};

}  // namespace phub
