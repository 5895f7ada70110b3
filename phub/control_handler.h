// What the control port asks of the server. HTTP is an adapter around this interface; the simulator
// calls it directly.
#pragma once

#include <functional>
#include <string>

#include "transport/messages.h"

namespace phub {

// Called exactly once, possibly later, on the control thread. It may outlive the request's
// connection: the answer is then dropped.
template <typename T>
using Reply = std::function<void(Result<T>)>;

// Control thread only. A call may answer before it returns. An Error thrown before the answer is
// the answer.
class ControlHandler {
 public:
  virtual ~ControlHandler() = default;
  virtual void join(JoinRequest request, Reply<JoinReply> reply) = 0;
  virtual void heartbeat(const Credential& who, Reply<Pulse> reply) = 0;
  virtual void leave(const Credential& who, Reply<Done> reply) = 0;
  virtual void barrier(const Credential& who, Reply<Done> reply) = 0;
  // The connection over which this incarnation waits in a barrier has ended.
  virtual void leave_barrier(const Credential& /*who*/) {}
  // `change.round` 0: the next one that no chunk has completed yet.
  virtual void set_hyper(const Credential& who, const HyperChange& change,
                         Reply<HyperReply> reply) = 0;
  // A new offer for an incarnation whose data connection broke. Its ticket is for that connection;
  // here the ticket of the join stays the one that counts.
  virtual void reconnect(const Credential& who, Reply<Offer> reply) = 0;
  // A page of the log, from record `from` on.
  virtual void log(const std::string& job, uint64_t from, Reply<LogPage> reply) = 0;
  // DELETE /v1/jobs/{job}: everyone in it gets an error.
  virtual void remove(const std::string& job, Reply<Done> reply) = 0;
  virtual ServerStatus status() = 0;
  virtual JobStatus job_status(const std::string& job) = 0;  // throws kNotFound
  // The last connection over which this incarnation's heartbeats came was closed from its side: by
  // its process, or with it.
  virtual void connection_ended(const Credential& /*who*/) {}
};

}  // namespace phub
