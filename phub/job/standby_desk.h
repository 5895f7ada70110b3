// A running job's standby, as the job's source sees it: who is a member, the connection, and what
// follows when the standby is lost (standby.h).
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "phub/job/job_context.h"

namespace phub {

class StandbyDesk {
 public:
  explicit StandbyDesk(const JobContext& context);  // REQUIRES: context.standby

  void begin();  // from now on the loss of the standby counts
  void tick();   // tells the standby who is a member; or looks whether the job can go on without
  // `error` is the job's; "": all ranks have left, or it was deleted.
  void end(const std::string& error);
  void link_broke();

  // The standby is lost: each rank is to say that it will never join it.
  bool is_lost() const { return stage_ != Stage::kThere; }
  void forgone(uint32_t rank, uint32_t incarnation);
  std::string status() const;  // for people

 private:
  enum class Stage : uint8_t { kThere, kLost, kAlone };

  void lose(const std::string& why);
  void check();

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  Part& local_;
  Uplink& uplink_;
  JobDriver& driver_;
  const Seats& seats_;
  Stage stage_ = Stage::kThere;
  std::string why_;                 // it was lost
  std::vector<RackNews> may_know_;  // then: each set of members that the standby may have
  std::set<std::pair<uint32_t, uint32_t>> forgone_;  // ranks, with their incarnations
};

}  // namespace phub
