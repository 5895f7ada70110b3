// The server above a box that has a parent, as the box's jobs see it: the calls of its control
// port, and connections to it.
//
// Control thread, but for connect(). Calls return at once; poll() calls the replies whose answers
// are there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/control/messages.h"
#include "transport/control/state_messages.h"
#include "transport/transport.h"

namespace phub {

class Parent {
 public:
  virtual ~Parent() = default;
  virtual std::string name() const = 0;  // its address, for messages
  virtual std::string transport()
      const = 0;  // over which gradients go there; auto: join() finds out
  virtual std::string rack_name() const = 0;  // this box's, for people
  // What each NIC sends there at most; 0: no limit.
  virtual uint64_t nic_bytes_per_s() const { return 0; }

  virtual void join(JoinRequest request, Reply<JoinReply> reply) = 0;
  virtual void heartbeat(const Credential& who, uint32_t timeout_ms, Reply<Pulse> reply) = 0;
  virtual void tell(const Credential& who, RackNews news, Reply<Done> reply) = 0;
  virtual void leave(const Credential& who, Reply<Done> reply) = 0;
  virtual void barrier(const Credential& who, Reply<Done> reply) = 0;
  virtual void set_hyper(const Credential& who, const HyperChange& change,
                         Reply<HyperReply> reply) = 0;
  virtual void checkpoint(const Credential& who, uint64_t round, Reply<CheckpointReply> reply) = 0;
  virtual void send_part(const Credential& who, const PartPiece& place, std::string piece,
                         Reply<Done> reply) = 0;
  virtual void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                             Reply<PartBytes> reply) = 0;
  virtual void begin_state(const Credential& who, const StateRequest& request,
                           Reply<StateReply> reply) = 0;
  virtual void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) = 0;
  virtual void write_state(const Credential& who, uint64_t offset, std::string piece,
                           Reply<Done> reply) = 0;
  virtual void apply_state(const Credential& who, Reply<HyperReply> reply) = 0;
  virtual void end_state(const Credential& who, Reply<Done> reply) = 0;
  virtual void reconnect(const Credential& who, Reply<Offer> reply) = 0;
  // Closes its connections. What it has asked for is not answered any more.
  virtual void forget(const Credential& who) = 0;

  // Any thread; blocks. Throws Error.
  virtual std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) = 0;

  virtual void poll() = 0;
  virtual int event_fd() const = 0;  // readable: call poll(); -1: there is none
};

}  // namespace phub
