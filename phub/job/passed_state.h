// The state of keys in a job of a rack, which the parent has: the calls of the rack's ranks go on
// to it. To the parent they are those of one rank, the rack, so there is one rank's at a time.
// Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/uplink.h"
#include "transport/control/state_messages.h"

namespace phub {

class PassedState {
 public:
  // The uplink outlives this.
  PassedState(std::string job, Uplink& uplink) : job_(std::move(job)), uplink_(uplink) {}

  // As RunningJob's calls of the state of keys.
  void begin(const StateRequest& request, Reply<StateReply> reply);
  void read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply);
  void check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const;
  void write(uint32_t rank, uint64_t offset, std::string piece, std::shared_ptr<void> charge,
             Reply<Done> reply);
  void apply(uint32_t rank, Reply<HyperReply> reply);
  // `done`: when the parent has dropped it, so that ranks of other racks may begin.
  void end(uint32_t rank, Reply<Done> done = nullptr);

  void tick();
  void refuse(ErrorCode code, const std::string& why);  // who waits: the job has ended

 private:
  void check_open(uint32_t rank, bool sets) const;
  void begun(const Result<StateReply>& result, bool was_open);
  void end_at_parent();
  void free();

  const std::string job_;
  Uplink& uplink_;
  enum class Stage : uint8_t {
    kFree,
    kBeginning,
    kOpen,
    kEnding,  // until the parent has dropped it: what comes next must not be dropped instead
  } stage_ = Stage::kFree;
  bool is_over_ = false;  // its rank has ended it, while it was begun
  bool asks_ = false;     // the parent to drop it
  uint32_t rank_ = 0;     // whose it is
  bool sets_ = false;
  uint64_t bytes_ = 0;
  struct Next {  // waits until the one before is dropped
    StateRequest request;
    Reply<StateReply> reply;
  };
  std::unique_ptr<Next> next_;
  std::vector<Reply<Done>> ended_;  // who waits for the end
};

}  // namespace phub
