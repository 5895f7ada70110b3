// A rack's parent, whose answers the test gives.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phub/clock.h"
#include "phub/job/parent.h"

namespace phub::testing {

class SetClock final : public Clock {
 public:
  uint64_t now_ms() const override { return now; }
  uint64_t now = 1000;
};

template <typename T>
T take(std::deque<T>& from) {
  EXPECT_FALSE(from.empty());
  T first = std::move(from.front());
  from.pop_front();
  return first;
}

class FakeParent final : public Parent {
 public:
  std::string name() const override { return "root:7717"; }
  std::string transport() const override { return "tcp"; }
  std::string rack_name() const override { return "rack-1"; }
  void join(JoinRequest request, Reply<JoinReply> reply) override {
    ids.push_back(request.id);
    joins.push_back(std::move(reply));
  }
  void heartbeat(const Credential& who, Reply<Pulse> reply, uint32_t) override {
    EXPECT_EQ(who.ticket, "ticket");
    beats.push_back(std::move(reply));
  }
  void tell(const Credential&, const RackNews& news, Reply<Done> reply, uint32_t) override {
    told.push_back(news);
    tells.push_back(std::move(reply));
  }
  void leave(const Credential&, Reply<Done> reply, uint32_t) override {
    leaves.push_back(std::move(reply));
  }
  void barrier(const Credential&, Reply<Done> reply, uint32_t) override {
    barriers.push_back(std::move(reply));
  }
  void set_hyper(const Credential&, const HyperRequest&, Reply<HyperReply> reply,
                 uint32_t) override {
    hypers.push_back(std::move(reply));
  }
  void change_branches(const Credential&, const BranchRequest&, Reply<BranchReply>,
                       uint32_t) override {}
  void report_loss(const Credential&, const LossRequest&, Reply<Done>, uint32_t) override {}
  void remark(const Credential&, const RemarkRequest&, Reply<Done>, uint32_t) override {}
  void checkpoint(const Credential&, const CheckpointRequest&, Reply<CheckpointReply> reply,
                  uint32_t) override {
    checkpoints.push_back(std::move(reply));
  }
  void send_part(const Credential&, const PartPiece& place, std::string,
                 Reply<Done> reply) override {
    sent.push_back(place);
    writes.push_back(std::move(reply));
  }
  void restored_part(const Credential&, uint32_t, uint64_t, Reply<PartBytes> reply) override {
    reads.push_back(std::move(reply));
  }
  void begin_state(const Credential&, const StateRequest& request, Reply<StateReply> reply,
                   uint32_t) override {
    begun.push_back(request);
    begins.push_back(std::move(reply));
  }
  void read_state(const Credential&, uint64_t, Reply<PartBytes> reply) override {
    reads.push_back(std::move(reply));
  }
  void write_state(const Credential&, uint64_t, std::string, Reply<Done> reply) override {
    writes.push_back(std::move(reply));
  }
  void apply_state(const Credential&, Reply<HyperReply> reply, uint32_t) override {
    hypers.push_back(std::move(reply));
  }
  void end_state(const Credential&, Reply<Done> reply, uint32_t) override {
    ends.push_back(std::move(reply));
  }
  void forgo_standby(const Credential&, Reply<Done>, uint32_t) override {}
  void reconnect(const Credential&, Reply<Offer> reply, uint32_t) override {
    offers.push_back(std::move(reply));
  }
  void forget(const Credential& who) override { forgotten.push_back(who.incarnation); }
  std::unique_ptr<WorkerLink> connect(const Offer&, const LinkLayout&) override { return nullptr; }
  void poll() override {}
  int event_fd() const override { return -1; }

  std::vector<std::string> ids;
  std::deque<Reply<JoinReply>> joins;
  std::deque<Reply<Pulse>> beats;
  std::vector<RackNews> told;
  std::deque<Reply<Done>> tells, leaves, barriers, writes, ends;
  std::vector<PartPiece> sent;
  std::vector<StateRequest> begun;
  std::deque<Reply<StateReply>> begins;
  std::deque<Reply<PartBytes>> reads;
  std::deque<Reply<HyperReply>> hypers;
  std::deque<Reply<CheckpointReply>> checkpoints;
  std::deque<Reply<Offer>> offers;
  std::vector<uint32_t> forgotten;
};

}  // namespace phub::testing
