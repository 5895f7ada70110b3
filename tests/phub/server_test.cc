// The server with a transport in the test's hands: what fails or takes long in it, and which thread
// has to wait for that.
#include "phub/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "numa/topology.h"
#include "transport/shm/transport.h"

namespace phub {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What the transport does besides, and what was done to it, on which thread.
struct Script {
  bool admit_finds_no_memory = false;
  std::mutex mutex;  // guards what follows
  std::vector<std::string> done;
  std::set<std::thread::id> threads;

  void note(const std::string& what) {
    const std::lock_guard lock(mutex);
    done.push_back(what);
    threads.insert(std::this_thread::get_id());
  }
};

class ScriptedLink final : public BoxLink {
 public:
  ScriptedLink(std::unique_ptr<BoxLink> link, Script& script)
      : link_(std::move(link)), script_(script) {}
  std::span<std::byte> results() override { return link_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return link_->endpoint(core); }
  void prepare(uint32_t rank) override {
    script_.note("prepare");
    link_->prepare(rank);
  }
  Offer admit(uint32_t rank, uint32_t incarnation) override {
    if (script_.admit_finds_no_memory) throw std::bad_alloc();
    return link_->admit(rank, incarnation);
  }
  void use_ticket(std::string ticket) override { link_->use_ticket(std::move(ticket)); }
  std::span<const std::byte> slots(uint32_t rank) override { return link_->slots(rank); }
  Rest revoke(uint32_t rank) override {
    return {&script_, [rest = link_->revoke(rank), &script = script_](void*) {
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              script.note("give back");
            }};
  }
  void close() override { link_->close(); }
  bool slots_belong_to_worker() const override { return link_->slots_belong_to_worker(); }

 private:
  std::unique_ptr<BoxLink> link_;
  Script& script_;
};

class ScriptedTransport final : public Transport {
 public:
  explicit ScriptedTransport(Script& script) : transport_(make_shm_transport()), script_(script) {}
  std::string_view name() const override { return transport_->name(); }
  std::string describe() const override { return transport_->describe(); }
  bool shares_memory() const override { return transport_->shares_memory(); }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return std::make_unique<ScriptedLink>(transport_->open_job(layout), script_);
  }
  int event_fd() const override { return transport_->event_fd(); }
  void handle_events(std::vector<TransportEvent>& out) override { transport_->handle_events(out); }

 private:
  std::unique_ptr<Transport> transport_;
  Script& script_;
};

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    ServerOptions options;
    options.topology = numa::from_synthetic("pack:1 core:2 pu:1");
    options.pin = false;
    std::vector<std::unique_ptr<Transport>> nics;
    nics.push_back(std::make_unique<ScriptedTransport>(script_));
    server_.emplace(std::move(options), std::move(nics), clock_);
  }

  // The answer comes into `to`, which outlives the server's part in it.
  void join(const std::string& job, int32_t rank, std::optional<Result<JoinReply>>& to) {
    JoinRequest request;
    request.spec.name = job;
    request.spec.keys = {{.name = "w", .elements = 100}};
    request.spec.world_size = 2;
    request.rank = rank;
    server_->join(std::move(request), [&to](Result<JoinReply> result) { to = std::move(result); });
  }
  // Without threads: all that is to be done now.
  void run() {
    for (int i = 0; i < 20; ++i) {
      server_->poll();
      for (uint32_t core = 0; core < server_->cores(); ++core) server_->core(core).step();
    }
  }
  template <typename Condition>
  void poll_until(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition() && std::chrono::steady_clock::now() < until) {
      server_->poll();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(condition());
  }

  Script script_;
  SteadyClock clock_;
  std::optional<Server> server_;
};

TEST_F(ServerTest, AnAdmissionWithoutMemoryIsARefusedJoin) {
  std::optional<Result<JoinReply>> refused, admitted;
  script_.admit_finds_no_memory = true;
  join("job", 0, refused);
  run();
  ASSERT_TRUE(refused);
  EXPECT_FALSE(*refused);
  EXPECT_EQ(refused->code, ErrorCode::kFull);
  EXPECT_THAT(refused->message, HasSubstr("out of memory"));
  script_.admit_finds_no_memory = false;
  join("job", 0, admitted);
  run();
  ASSERT_TRUE(admitted);
  EXPECT_TRUE(*admitted) << admitted->message;
}

// Each is planned with those before it, although none of them was there when it was asked for.
TEST_F(ServerTest, JobsThatComeTogetherShareTheCores) {
  std::optional<Result<JoinReply>> one, two;
  join("one", 0, one);
  join("two", 0, two);
  run();
  ASSERT_TRUE(one && *one && two && *two);
  EXPECT_NE(one->value->layout.queue_chunks, two->value->layout.queue_chunks);
}

// Unmapping many gigabytes takes a while: the control thread does not wait for it. A successor's
// memory does.
TEST_F(ServerTest, WhatARankHadIsGivenBackInTheBackground) {
  std::optional<Result<JoinReply>> first, second;
  std::optional<Result<Done>> left;
  server_->start_threads();
  join("job", 0, first);
  poll_until([&] { return first.has_value(); });
  ASSERT_TRUE(*first) << first->message;
  join("job", 1, second);
  poll_until([&] { return second.has_value(); });
  ASSERT_TRUE(*second) << second->message;
  const Credential who{"job", 1, second->value->incarnation, second->value->offer.ticket};
  server_->leave(who, [&](Result<Done> result) { left = std::move(result); });
  poll_until([&] { return left.has_value(); });
  second.reset();
  join("job", 1, second);
  poll_until([&] { return second.has_value(); });
  EXPECT_TRUE(*second) << second->message;
  server_->stop_threads();
  EXPECT_THAT(script_.done, ElementsAre("prepare", "prepare", "give back", "prepare"));
  EXPECT_FALSE(script_.threads.contains(std::this_thread::get_id()));
  server_.reset();  // while the script is there
}

}  // namespace
}  // namespace phub
