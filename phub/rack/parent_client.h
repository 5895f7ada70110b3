// The calls to a parent's control port, over HTTP: a thread for each kind of call of a job, as each
// may wait for others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "phub/job/parent.h"
#include "transport/paced/shares.h"
#include "transport/tls/client_options.h"

namespace phub {

class ParentClient final : public Parent {
 public:
  struct Options {
    std::string server;  // HOST:PORT, with https:// before it over TLS
    std::string token;
    // For gradients: tcp, verbs, ofi. "auto": the job's if the parent has it, else verbs if both
    // can, else tcp; and memory if the parent, or a box under it, is on this host.
    std::string transport = "auto";
    uint64_t nic_bytes_per_s = 0;  // limit of each NIC towards the parent; 0: none
    ClientTls tls;
    std::string rack_name = "a rack";  // this box's, for people
    std::string title = "parent";
  };
  explicit ParentClient(Options options);
  ~ParentClient() override;
  ParentClient(const ParentClient&) = delete;
  ParentClient& operator=(const ParentClient&) = delete;

  std::string name() const override { return options_.server; }
  std::string title() const override { return options_.title; }
  std::string transport() const override { return options_.transport; }
  uint64_t nic_bytes_per_s() const override { return options_.nic_bytes_per_s; }
  std::string rack_name() const override { return options_.rack_name; }
  void join(JoinRequest request, Reply<JoinReply> reply) override;
#define PHUB_CALL(name, Answer, ...) \
  void name(const Credential& who, Reply<Answer> reply, uint32_t timeout_ms) override;
#define PHUB_REQUEST(name, Request, Answer, ...)                                \
  void name(const Credential& who, const Request& request, Reply<Answer> reply, \
            uint32_t timeout_ms) override;
#include "transport/control/calls.def"
  void send_part(const Credential& who, const PartPiece& place, std::string piece,
                 Reply<Done> reply) override;
  void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                     Reply<PartBytes> reply) override;
  void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) override;
  void write_state(const Credential& who, uint64_t offset, std::string piece,
                   Reply<Done> reply) override;
  void forget(const Credential& who) override;
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override;
  void poll() override;
  int event_fd() const override { return event_fd_; }

 private:
  class Lane;
  using Call = std::function<void()>;

  Lane& lane(const std::string& name);
  void answer(Call reply);  // any thread
  std::unique_ptr<WorkerLink> connect_unpaced(const Offer& offer, const LinkLayout& layout) const;
  template <typename T, typename Ask>
  void call(const std::string& lane_name, Ask ask, Reply<T> reply);

  const Options options_;
  std::optional<BudgetShares> shares_;  // for traffic to the parent; nullopt: it has no limit
  const int event_fd_;
  uint64_t joins_ = 0;
  std::map<std::string, std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Lane>> over_;  // until their thread has ended

  std::mutex mutex_;  // guards the members below
  std::vector<Call> answers_;
};

}  // namespace phub
