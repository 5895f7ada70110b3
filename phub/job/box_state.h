// The state of keys that ranks read from, and set at, the box that has their job.
//
// One rank at a time reads or sets, so the memory for it is bounded by the size of the keys. A set
// is over for its rank when its round is known; every core takes the state before it closes that
// round (core/key_states.h), and until then no rank sets another one.
//
// Other boxes that have parts of the job make memory for theirs before the boundary, and fetch the
// state that is set, so that a core has it when it closes the round. They send the copies of their
// cores here.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "phub/job/job_context.h"
#include "phub/job/state_desk.h"
#include "phub/job/state_transfer.h"

namespace phub {

class BoxState final : public StateDesk {
 public:
  explicit BoxState(const JobContext& context);

  void begin(const StateRequest& request, Reply<StateReply> reply) override;
  void read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) override;
  void check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const override;
  void write(uint32_t rank, uint64_t offset, std::string piece, std::shared_ptr<void> charge,
             Reply<Done> reply) override;
  void apply(uint32_t rank, Reply<HyperReply> reply) override;
  void end(uint32_t rank, Reply<Done> done = nullptr) override;
  void refuse(ErrorCode code, const std::string& why) override;

  // Adds the state that the cores copy to the boundary. Returns the number of that state; 0: there
  // is none.
  uint64_t at_boundary(Boundary& boundary);
  // A core has copied its chunks for a get, or has taken the state that was set.
  void copied(const CoreReport& report);
  uint64_t bytes() const;  // memory, in the budget

 private:
  void note_allocated(const std::shared_ptr<StateTransfer>& transfer,
                      const std::optional<Error>& failed);
  void check_no_set_waits() const;
  void share();
  void decide();
  void drop(std::shared_ptr<StateTransfer>& transfer);
  std::shared_ptr<StateTransfer> open(uint32_t rank, bool sets) const;
  void move(BoxMoves::Direction direction);

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  RemoteParts& remote_;
  JobDriver& driver_;
  const bool has_standby_;
  std::shared_ptr<StateTransfer> state_;      // a rank reads or sets it; null: none does
  std::shared_ptr<StateTransfer> set_state_;  // was set, and some core has not taken it yet
};

}  // namespace phub
