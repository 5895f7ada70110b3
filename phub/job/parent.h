// The server above a box that has a parent, as the box's jobs see it: the calls of its control
// port, and connections to it.
//
// Control thread, but for connect(). Calls return at once; poll() calls the replies whose answers
// are there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/control/calls.h"
#include "transport/transport.h"

namespace phub {

class Parent {
 public:
  virtual ~Parent() = default;
  virtual std::string name() const = 0;                   // its address, for messages
  virtual std::string title() const { return "parent"; }  // or "standby"
  virtual std::string transport() const = 0;  // for gradients to the parent; auto: join() finds out
  virtual std::string rack_name() const = 0;  // this box's, for people
  // The most that each NIC sends to the parent; 0: no limit.
  virtual uint64_t nic_bytes_per_s() const { return 0; }

  virtual void join(JoinRequest request, Reply<JoinReply> reply) = 0;
  // The calls of calls.def. kTimeout is the answer after `timeout_ms` without one; 0: no limit.
#define PHUB_CALL(name, Answer, ...)                            \
  virtual void name(const Credential& who, Reply<Answer> reply, \
                    uint32_t timeout_ms = calls::name.timeout_ms) = 0;
#define PHUB_REQUEST(name, Request, Answer, ...)                                        \
  virtual void name(const Credential& who, const Request& request, Reply<Answer> reply, \
                    uint32_t timeout_ms = calls::name.timeout_ms) = 0;
#include "transport/control/calls.def"
  virtual void send_part(const Credential& who, const PartPiece& place, std::string piece,
                         Reply<Done> reply) = 0;
  virtual void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                             Reply<PartBytes> reply) = 0;
  virtual void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) = 0;
  virtual void write_state(const Credential& who, uint64_t offset, std::string piece,
                           Reply<Done> reply) = 0;
  // Closes the rack's connections. Its open calls get no answer any more.
  virtual void forget(const Credential& who) = 0;

  // Any thread; blocks. Throws Error.
  virtual std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) = 0;

  virtual void poll() = 0;
  virtual int event_fd() const = 0;  // readable: call poll(); -1: there is none
};

}  // namespace phub
