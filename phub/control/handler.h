// The server as the control port sees it. HTTP is an adapter around this interface; the simulator
// calls it directly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "transport/control/calls.h"
#include "transport/control/shard_messages.h"
#include "transport/error.h"

namespace phub {

// The creator of a job, where the box asks for tokens.
struct JobOwner {
  Caller creator;
  std::string join_id;       // the id of the join that created it
  std::string token_sha256;  // the job token's, in hexadecimal digits; "": nobody has got it yet
};

// Control thread only. A call may reply before it returns, or later. An Error that it throws
// instead is the reply.
class ControlHandler {
 public:
  virtual ~ControlHandler() = default;
  virtual void join(JoinRequest /*request*/, Reply<JoinReply> /*reply*/) { elsewhere(); }
  // Takes memory for such a text before it is decoded; the result becomes JoinRequest::held. Any
  // thread. Throws Error if there is no memory for it.
  virtual std::shared_ptr<void> hold_for_join(std::string_view /*text*/) { return nullptr; }
  // The calls of calls.def: a rank asks, or, where the table says so, an admin of the job.
#define PHUB_CALL(name, Answer, ...) \
  virtual void name(const Credential& /*who*/, Reply<Answer> /*reply*/) { elsewhere(); }
#define PHUB_REQUEST(name, Request, Answer, ...)                           \
  virtual void name(const Credential& /*who*/, const Request& /*request*/, \
                    Reply<Answer> /*reply*/) {                             \
    elsewhere();                                                           \
  }
#include "transport/control/calls.def"
  // The connection over which this incarnation waits in a barrier has ended.
  virtual void leave_barrier(const Credential& /*who*/) {}
  // The losses that ranks have reported, from round `from` on.
  virtual void losses(const std::string& /*job*/, uint64_t /*from*/, Reply<LossPage> /*reply*/) {
    elsewhere();
  }
  // The answer to the join of this incarnation could not be made: nobody will use it.
  virtual void join_unanswered(const Credential& /*who*/) {}
  // A piece of a rank's part of a checkpoint. The first is asked before its bytes are read, and
  // throws why they are not wanted. `charge` accounts for their memory, and is released with them.
  virtual void check_part(const Credential& /*who*/, const PartPiece& /*place*/,
                          uint64_t /*bytes*/) {
    elsewhere();
  }
  virtual void take_part(const Credential& /*who*/, const PartPiece& /*place*/,
                         std::string /*piece*/, std::shared_ptr<void> /*charge*/,
                         Reply<Done> /*reply*/) {
    elsewhere();
  }
  // A piece of the rank's part of the checkpoint that it goes on from; of a rack, of that of one of
  // its ranks.
  virtual void restored_part(const Credential& /*who*/, uint32_t /*whose*/, uint64_t /*offset*/,
                             Reply<PartBytes> /*reply*/) {
    elsewhere();
  }
  // A piece of the state of keys that the rank has begun to read or to set. One that comes is
  // checked before its bytes are read, as a part is.
  virtual void read_state(const Credential& /*who*/, uint64_t /*offset*/,
                          Reply<PartBytes> /*reply*/) {
    elsewhere();
  }
  virtual void check_state_piece(const Credential& /*who*/, uint64_t /*offset*/,
                                 uint64_t /*bytes*/) {
    elsewhere();
  }
  virtual void write_state(const Credential& /*who*/, uint64_t /*offset*/, std::string /*piece*/,
                           std::shared_ptr<void> /*charge*/, Reply<Done> /*reply*/) {
    elsewhere();
  }
  // A page of the log, from record `from` on.
  virtual void log(const std::string& /*job*/, uint64_t /*from*/, Reply<LogPage> /*reply*/) {
    elsewhere();
  }
  // DELETE /v1/jobs/{job}: ends the job; all its workers get an error.
  virtual void remove(const std::string& /*job*/, Reply<Done> /*reply*/) { elsewhere(); }
  // Throws the reason why nobody should come with a new job, for now or for good.
  virtual void check_ready(Reply<Done> reply) { reply(Done{}); }
  virtual ServerStatus status() { elsewhere(); }
  virtual JobStatus job_status(const std::string& /*job*/) { elsewhere(); }  // throws kNotFound
  // Returns null if there is no such job, or if nobody owns it.
  virtual const JobOwner* owner(const std::string& /*job*/) const { return nullptr; }
  // Ends the ranks for which `why_not` has a reason; "": the rank may stay.
  using WhyNot = std::function<std::string(const Caller& caller, const std::string& job)>;
  virtual void expel(const WhyNot& /*why_not*/) {}
  // A box comes to serve under this server; then its mail (transport/control/shard_messages.h).
  virtual void join_shard(ShardHello /*hello*/, Reply<ShardWelcome> /*reply*/) { elsewhere(); }
  virtual void take_mail(uint64_t /*shard*/, ShardMail /*mail*/, Reply<ShardOrders> /*reply*/) {
    elsewhere();
  }
  // A piece of a shard's part of a job's checkpoint of that round: the job goes on from it, or it
  // is to be written; or of the state of keys that a rank sets, or reads. As with a rank's part,
  // one that comes is checked before its bytes are read.
  virtual void read_copy(uint64_t /*shard*/, const CopyPlace& /*place*/,
                         Reply<PartBytes> /*reply*/) {
    elsewhere();
  }
  virtual void check_copy(uint64_t /*shard*/, const CopyPlace& /*place*/, uint64_t /*bytes*/) {
    elsewhere();
  }
  virtual void write_copy(uint64_t /*shard*/, const CopyPlace& /*place*/,
                          std::string_view /*piece*/, Reply<Done> /*reply*/) {
    elsewhere();
  }
  // The last connection with heartbeats of this incarnation was closed by its process, or because
  // its process ended.
  virtual void connection_ended(const Credential& /*who*/) {}

 protected:
  // A call that is not overridden is not done here.
  [[noreturn]] void elsewhere() const { fail(ErrorCode::kNotFound, "{}", why_not_here()); }
  virtual std::string why_not_here() const { return "this server does nothing of that kind"; }
};

}  // namespace phub
