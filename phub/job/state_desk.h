// The calls by which ranks of a running job read and set the state of keys: their parameters and
// optimizer states. Control thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/control/messages.h"
#include "transport/control/state_messages.h"
#include "transport/error.h"

namespace phub {

// All calls may throw Error. REQUIRES: the rank is a member of the job.
class StateDesk {
 public:
  virtual ~StateDesk() = default;
  virtual void begin(const StateRequest& request, Reply<StateReply> reply) = 0;
  virtual void read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) = 0;
  // Throws why the piece may not come.
  virtual void check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const = 0;
  // `charge` counts the memory of the piece until the piece is written.
  virtual void write(uint32_t rank, uint64_t offset, std::string piece,
                     std::shared_ptr<void> charge, Reply<Done> reply) = 0;
  virtual void apply(uint32_t rank, Reply<HyperReply> reply) = 0;
  // The rank ends what it has begun, or is lost (`done` is null).
  virtual void end(uint32_t rank, Reply<Done> done = nullptr) = 0;
  // The job has ended: refuses the calls that wait.
  virtual void refuse(ErrorCode code, const std::string& why) = 0;
};

}  // namespace phub
