// What a box that serves under another answers at its own control port: whether it lives and is
// ready. Jobs are the server's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "phub/control/handler.h"

namespace phub {

class ShardHealth final : public ControlHandler {
 public:
  ShardHealth(std::string server, std::function<bool()> has_joined)
      : server_(std::move(server)), has_joined_(std::move(has_joined)) {}

  void check_ready(Reply<Done> reply) override {
    if (!has_joined_()) fail(ErrorCode::kUnavailable, "this box has not joined {}", server_);
    reply(Done{});
  }

  void join(JoinRequest, Reply<JoinReply>) override { elsewhere(); }
  void heartbeat(const Credential&, Reply<Pulse>) override { elsewhere(); }
  void leave(const Credential&, Reply<Done>) override { elsewhere(); }
  void barrier(const Credential&, Reply<Done>) override { elsewhere(); }
  void set_hyper(const Credential&, const HyperChange&, Reply<HyperReply>) override { elsewhere(); }
  void set_hyper(const Admin&, const HyperChange&, Reply<HyperReply>) override { elsewhere(); }
  void change_branches(const Credential&, const BranchChange&, Reply<BranchReply>) override {
    elsewhere();
  }
  void change_branches(const Admin&, const BranchChange&, Reply<BranchReply>) override {
    elsewhere();
  }
  void report_loss(const Credential&, const LossRequest&, Reply<Done>) override { elsewhere(); }
  void losses(const std::string&, uint64_t, Reply<LossPage>) override { elsewhere(); }
  void reconnect(const Credential&, Reply<Offer>) override { elsewhere(); }
  void check_part(const Credential&, const PartPiece&, uint64_t) override { elsewhere(); }
  void take_part(const Credential&, const PartPiece&, std::string, std::shared_ptr<void>,
                 Reply<Done>) override {
    elsewhere();
  }
  void restored_part(const Credential&, uint32_t, uint64_t, Reply<PartBytes>) override {
    elsewhere();
  }
  void begin_state(const Credential&, const StateRequest&, Reply<StateReply>) override {
    elsewhere();
  }
  void read_state(const Credential&, uint64_t, Reply<PartBytes>) override { elsewhere(); }
  void check_state_piece(const Credential&, uint64_t, uint64_t) override { elsewhere(); }
  void write_state(const Credential&, uint64_t, std::string, std::shared_ptr<void>,
                   Reply<Done>) override {
    elsewhere();
  }
  void apply_state(const Credential&, Reply<HyperReply>) override { elsewhere(); }
  void end_state(const Credential&, Reply<Done>) override { elsewhere(); }
  void checkpoint(const Credential&, uint64_t, Reply<CheckpointReply>) override { elsewhere(); }
  void log(const std::string&, uint64_t, Reply<LogPage>) override { elsewhere(); }
  void remove(const std::string&, Reply<Done>) override { elsewhere(); }
  ServerStatus status() override { elsewhere(); }
  JobStatus job_status(const std::string&) override { elsewhere(); }

 private:
  [[noreturn]] void elsewhere() const {
    fail(ErrorCode::kNotFound, "this box serves under {}: ask there", server_);
  }

  const std::string server_;
  const std::function<bool()> has_joined_;
};

}  // namespace phub
