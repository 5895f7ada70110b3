// What every transport promises (transport/transport.h), as one suite of tests over any of them. A
// transport joins by a factory of rigs in transport_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace phub {

// A transport and the means to drive both of its sides from one thread.
class TransportRig {
 public:
  virtual ~TransportRig() = default;
  virtual Transport& transport() = 0;

  // Connects a worker, handling the NIC's events meanwhile (they go to events()).
  virtual std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) = 0;

  // Runs a worker's call in a thread of its own, handling the NIC's events meanwhile.
  template <typename Call>
  auto meanwhile(const Call& call) {
    auto result = std::async(std::launch::async, call);
    while (result.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
      transport().handle_events(events());
    }
    return result.get();
  }
  void reconnect(WorkerLink& worker, const Offer& offer) {
    meanwhile([&] { worker.reconnect(offer); });
  }

  // Lets what was posted arrive: simulated time passes here, real time passes by itself.
  virtual void pump() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

  // What an owner's thread does for an endpoint that it neither polls nor sleeps on: where bytes
  // move only while somebody polls, both ends must.
  virtual void drive(Endpoint& /*endpoint*/) {}

  // Whether arrivals come in the order in which they reached the NIC, whoever sent them.
  virtual bool is_fifo() const { return false; }

  // The worker's process ends without a word. The kernel closes what a process had; so does the
  // link's end.
  virtual void kill(std::unique_ptr<WorkerLink> worker) { worker.reset(); }

  // Events of the NIC that the test has not taken yet.
  std::vector<TransportEvent>& events() { return events_; }

 private:
  std::vector<TransportEvent> events_;
};

struct TransportFactory {
  std::string name;
  std::function<std::unique_ptr<TransportRig>()> make;

  friend void PrintTo(  // NOLINT(readability-identifier-naming): GoogleTest looks for it
      const TransportFactory& factory, std::ostream* out) {
    *out << factory.name;
  }
};

class TransportSuite : public ::testing::TestWithParam<TransportFactory> {
 protected:
  static constexpr uint32_t kChunkBytes = 256;

  void SetUp() override { rig_ = GetParam().make(); }
  void TearDown() override;

  // A job with one queue per element of `queue_chunks`, chunks of kChunkBytes one after another.
  void open(uint32_t ranks, std::vector<uint32_t> queue_chunks);
  // Admits, attaches and connects a rank.
  void join(uint32_t rank, uint32_t incarnation);
  // What the control thread and the cores do when a rank is gone.
  void drop(uint32_t rank);

  uint64_t offset_of(uint32_t queue, uint32_t chunk) const;
  Write write_of(uint32_t queue, uint32_t chunk, uint32_t round) const;
  uint32_t cores() const { return layout_.cores; }

  // Pumps, and drives every endpoint but the one that sleeps.
  void pump();
  // Posts, flushing and pumping while there is no room.
  void post_surely(Endpoint& endpoint, QueuePair to, const Write& write);
  // Polls the endpoint, pumping, until `count` arrivals are there or ten seconds have passed.
  std::vector<Arrival> poll_for(Endpoint& endpoint, size_t count);
  // Pumps and handles events until the condition holds; false after ten seconds.
  bool eventually(const std::function<bool()>& condition);

  LinkLayout layout_;
  std::unique_ptr<TransportRig> rig_;
  std::unique_ptr<BoxLink> box_;
  std::vector<std::unique_ptr<WorkerLink>> workers_;  // by rank
  std::vector<Endpoint*> others_;                     // that a test has besides
  Endpoint* asleep_ = nullptr;
};

}  // namespace phub
