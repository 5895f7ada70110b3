// `phub serve` over RDMA as a process of its own, with its memory and its keys in sight; and ranks
// that talk to it. For tests that attack it. Needs root and a machine to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/worker/process.h"
#include "transport/control/control_client.h"
#include "worker/session/session.h"

namespace phub::testing {

struct MemoryKey {  // as the kernel lists it
  uint32_t remote = 0, local = 0;
  uint64_t bytes = 0;
  int pid = 0;
};
// Every registered memory of this machine. Throws std::runtime_error.
std::vector<MemoryKey> memory_keys();

// Objects of the kernel's RDMA subsystem by their names ("pd", "cq", "qp", "mr", "cm_id", "srq"…)
// and this process's open descriptors, as one line of text.
std::string rdma_resources();
size_t open_descriptors();

class VerbsServer {
 public:
  explicit VerbsServer(const std::string& cores = "1");
  ~VerbsServer();

  const std::string& address() const { return address_; }
  int pid() const { return process_->pid(); }
  bool alive() { return !process_->wait(std::chrono::milliseconds(0)); }
  // Whether it goes on or how it ended, and what it has printed.
  std::string output() const;

  std::vector<std::byte> read(uint64_t address, size_t bytes) const;
  // Where these bytes begin, in its writable memory at a multiple of 128. Throws std::runtime_error
  // unless they are there once.
  uint64_t find(std::span<const std::byte> bytes) const;

 private:
  std::unique_ptr<Process> process_;
  std::string address_;
};

// A rank whose offer can be seen, driven by hand.
class OpenRank {
 public:
  OpenRank(const VerbsServer& server, const JobSpec& spec, int32_t rank, bool replace = false);

  const JoinReply& reply() const { return reply_; }
  const QueueOffer& slots(uint32_t queue = 0) const { return reply_.offer.queues.at(queue); }
  uint64_t slot_bytes() const { return layout_.slots_bytes; }
  Credential credential() const;
  ControlClient& control() { return control_; }

  void connect();  // with the manners of the library
  WorkerLink& link() { return *link_; }
  Session& session() { return *session_; }
  // Polls until every key has its result. Throws std::runtime_error after 20 s.
  void await();

 private:
  ControlClient control_;
  JoinReply reply_;
  LinkLayout layout_;
  std::unique_ptr<WorkerLink> link_;
  std::unique_ptr<Session> session_;
};

}  // namespace phub::testing
