// Makes broken connections of a running job's ranks anew: every core stops using the broken one;
// then there is a new offer, every core uses the new connection, and the worker gets the offer.
//
// Control thread; the running job owns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "phub/job/job_context.h"
#include "phub/task.h"

namespace phub {

class Reconnections {
 public:
  explicit Reconnections(const JobContext& context);

  // REQUIRES: `who` is a member of the job. Throws Error: the transport cannot do this, or the rank
  // is being reconnected or lost.
  void begin(const Credential& who, Reply<Offer> reply);
  // A core has stopped using the rank's connection, or uses the new one.
  void core_answered(uint32_t rank);
  void refuse(ErrorCode code, const std::string& why);  // the job ends

 private:
  struct Reconnection {
    uint32_t answers = 0;  // from cores
    Event all_answered;
    Reply<Offer> reply;
  };
  Task<Offer> connect_again(uint32_t rank, uint32_t incarnation);
  void check_secure(uint32_t rank, uint32_t incarnation) const;

  Job& job_;
  const RankTable& ranks_;
  const std::span<Part* const> everywhere_;
  Seats& seats_;
  JobDriver& driver_;
  std::map<uint32_t, Reconnection> by_rank_;
};

}  // namespace phub
