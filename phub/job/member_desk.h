// The members of a running job: joins, the check of credentials, the members' calls to the
// membership, and losses.
//
// Control thread, unless a function says otherwise; the running job owns it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/rack_desk.h"
#include "phub/job/remarks.h"
#include "phub/job/save_desk.h"
#include "phub/job/standby_desk.h"
#include "phub/task.h"

namespace phub {

class MemberDesk {
 public:
  // `transport`: of the job, by its name; `rack`: null: there is no parent. All outlive this.
  MemberDesk(const JobContext& context, const std::string& transport, Savers& savers,
             PartDesk& parts, SaveDesk& saves, RackDesk* rack, StandbyDesk* standby,
             Remarks& remarks);

  // Any thread. Throw Error: kNotFound or kFenced if the worker was in life `epoch` of a job of
  // this name, which is not this one or is further; kMismatch if a worker that joins means another
  // job.
  void check_life(uint64_t epoch) const;
  void check_same(const JobSpec& spec, const std::string& transport) const;
  // As check_life(), and kRewound if the job has gone on from a checkpoint since. 0: any life.
  void check_same_life(uint64_t epoch) const;

  // A join that is sent again gets the answer of the first. Throws Error(kInvalid): the rank saves,
  // and none of this job may.
  void join(const JoinRequest& request, Reply<JoinReply> reply);
  // The answer to the rank's join could not be made.
  void join_unanswered(uint32_t rank, uint32_t incarnation);

  // Throws unless the credential is that of a live incarnation: kNotFound, kUnauthorized, kFenced,
  // or the error of the job's end.
  void authenticate(const Credential& who);
  // REQUIRES: authenticate(who), for `rank` and `who`.
  Pulse heartbeat(uint32_t rank);
  void take_news(uint32_t rank, RackNews news);  // throws Error(kInvalid): the rank is no rack
  void leave(uint32_t rank, Reply<Done> reply);
  void barrier(uint32_t rank, Reply<Done> reply);

  void leave_barrier(const Credential& who);
  void control_ended(const Credential& who);             // the connection of its heartbeats
  void data_ended(uint32_t rank, uint32_t incarnation);  // the connection of its gradients
  // Loses the ranks for which `why_not` has a reason.
  void expel(const std::function<std::string(const Caller& caller)>& why_not);
  void lose(uint32_t rank, uint32_t incarnation, const std::string& why);

  // For the driver: ranks whose join is being answered keep their lease.
  void tick(uint64_t now);
  Seat seat_for(const MembershipAction& admission) const;
  void rank_gone(uint32_t rank);  // the membership has lost it: says so in the server's log
  void answer(const MembershipAction& action);
  void refuse(ErrorCode code, const std::string& why);  // joins that wait: the job has ended

 private:
  void take_members(Seat& seat, RackNews news) const;
  void check_source_is_there() const;
  struct WaitingJoin {
    std::string id;
    Caller caller;
    bool saves = false;
    std::vector<KeyInterest> interest = {};
    std::vector<uint64_t> hosts = {};       // by rank, as JobSpec::rank_hosts
    std::vector<Reply<JoinReply>> replies;  // more than one: it was sent again
  };
  void check_vanished(uint32_t rank);
  void answer_join(const MembershipAction& action);
  Story answer_join(uint32_t rank, std::vector<Reply<JoinReply>> replies);

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  const RankTable& ranks_;
  Seats& seats_;
  Requests& requests_;
  const SavedLife& life_;
  JobDriver& driver_;
  const std::string& transport_;
  Savers& savers_;
  PartDesk& parts_;
  SaveDesk& saves_;
  RackDesk* const rack_;
  StandbyDesk* const standby_;  // null: there is no standby
  Remarks& remarks_;
  std::map<uint64_t, WaitingJoin> joins_;  // by token
  // Ranks and incarnations whose join is being answered: they cannot send heartbeats yet.
  std::multiset<std::pair<uint32_t, uint32_t>> answering_;
};

}  // namespace phub
