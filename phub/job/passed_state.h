// The state of keys in a job of a rack: the parent has it, and this passes the calls of the rack's
// ranks on to the parent. To the parent they are calls of one rank, the rack, so one rank at a time
// reads or sets. Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/state_desk.h"
#include "phub/job/uplink.h"
#include "transport/control/state_messages.h"

namespace phub {

class PassedState final : public StateDesk {
 public:
  // The uplink outlives this.
  PassedState(std::string job, Uplink& uplink) : job_(std::move(job)), uplink_(uplink) {}

  void begin(const StateRequest& request, Reply<StateReply> reply) override;
  void read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) override;
  void check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const override;
  void write(uint32_t rank, uint64_t offset, std::string piece, std::shared_ptr<void> charge,
             Reply<Done> reply) override;
  void apply(uint32_t rank, Reply<HyperReply> reply) override;
  // Answers when the parent has dropped the state, so that ranks of other racks may begin.
  void end(uint32_t rank, Reply<Done> done = nullptr) override;
  void refuse(ErrorCode code, const std::string& why) override;

  void tick();

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
    kEnding,  // until the parent has dropped it, so that it cannot drop the next one instead
  } stage_ = Stage::kFree;
  bool is_over_ = false;  // its rank has ended it before the parent's answer to begin
  bool asks_ = false;     // has asked the parent to drop it
  uint32_t rank_ = 0;     // the rank that reads or sets
  bool sets_ = false;
  uint64_t bytes_ = 0;
  struct Next {  // waits until the state before is dropped
    StateRequest request;
    Reply<StateReply> reply;
  };
  std::unique_ptr<Next> next_;
  std::vector<Reply<Done>> ended_;  // replies that wait for the end
};

}  // namespace phub
