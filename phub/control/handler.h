// The server as the control port sees it. HTTP is an adapter around this interface; the simulator
// calls it directly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "phub/control/shard_calls.h"
#include "transport/control/calls.h"
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
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define PHUB_CALL(name, Answer, ...) \
  virtual void name(const Credential& /*who*/, Reply<Answer> /*reply*/) { elsewhere(); }
#define PHUB_REQUEST(name, Request, Answer, ...)                           \
  virtual void name(const Credential& /*who*/, const Request& /*request*/, \
                    Reply<Answer> /*reply*/) {                             \
    elsewhere();                                                           \
  }
#define PHUB_PIECE(name, where, ...) \
  virtual void name(__VA_ARGS__) { elsewhere(); }
#define PHUB_NOTICE(name, where) \
  virtual void name(const Credential& /*who*/) {}
#include "transport/control/calls.def"
#pragma GCC diagnostic pop
  // The losses that ranks have reported, from round `from` on.
  virtual void losses(const std::string& /*job*/, uint64_t /*from*/, Reply<LossPage> /*reply*/) {
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
  // The calls of boxes that serve under this server.
  virtual ShardCalls& shards() { elsewhere(); }

 protected:
  // A call that is not overridden is not done here.
  [[noreturn]] void elsewhere() const { fail(ErrorCode::kNotFound, "{}", why_not_here()); }
  virtual std::string why_not_here() const { return "this server does nothing of that kind"; }
};

}  // namespace phub
