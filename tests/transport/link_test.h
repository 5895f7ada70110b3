// A box with one job over one transport, and what tests do with its ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/transport_suite.h"

namespace phub {

class LinkTest : public ::testing::Test {
 protected:
  void TearDown() override {
    while (!attached_.empty()) detach(*attached_.begin());
    box_.reset();
    rig_.reset();
  }
  // One queue for each core.
  void open(uint32_t ranks = 2, uint32_t cores = 2, uint64_t bytes = 5000, uint32_t chunks = 8) {
    layout_ = {};
    layout_.max_ranks = ranks;
    layout_.cores = cores;
    layout_.queue_chunks.assign(cores, chunks);
    layout_.core_node.assign(cores, 0);
    layout_.slots_bytes = layout_.results_bytes = bytes;
    box_ = rig_->transport().open_job(layout_);
  }
  void attach(uint32_t rank, uint32_t incarnation) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).attach(rank, incarnation);
    attached_.insert(rank);
  }
  void detach(uint32_t rank) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).detach(rank);
    attached_.erase(rank);
  }
  void drop(uint32_t rank) {
    if (attached_.contains(rank)) detach(rank);
    box_->revoke(rank);
  }
  std::unique_ptr<WorkerLink> join(uint32_t rank, uint32_t incarnation) {
    const Offer offer = box_->admit(rank, incarnation);
    attach(rank, incarnation);
    return rig_->connect(offer, layout_);
  }
  void handle(int times = 20) {
    for (int i = 0; i < times; ++i) {
      rig_->transport().handle_events(rig_->events());
      rig_->pump();
    }
  }
  // Polls until `count` arrivals are there; with 0, for a while. `peer`: who sends them, and may
  // have to be polled for that.
  std::vector<Arrival> poll(Endpoint& endpoint, size_t count, Endpoint* peer = nullptr) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::vector<Arrival> all;
    for (int i = 0; count == 0 ? i < 50 : all.size() < count; ++i) {
      std::array<Arrival, 64> some;
      const size_t taken = endpoint.poll(some);
      all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(taken));
      if (peer != nullptr) {
        peer->poll({});
        rig_->drive(*peer);
      }
      if (taken == 0) rig_->pump();
      if (std::chrono::steady_clock::now() > until) break;
    }
    return all;
  }
  // A write each way on the queue of a core: what is read is what was written, where the write
  // says.
  void expect_exchange(WorkerLink& worker, uint32_t rank, uint32_t queue = 0) {
    SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed_ << ", rank " << rank);
    const auto fill = [&](std::span<std::byte> memory) {
      std::ranges::generate(memory, [&] { return static_cast<std::byte>(random_()); });
    };
    const auto one_way = [&](Endpoint& from, QueuePair to, const Write& write, Endpoint& at,
                             QueuePair arrives) {
      ASSERT_TRUE(from.post(to, write));
      from.flush();
      const std::vector<Arrival> come = poll(at, 1, &from);
      ASSERT_EQ(come.size(), 1u);
      EXPECT_TRUE(come[0].ok && come[0].imm == write.imm);
      EXPECT_TRUE(come[0].queue == arrives.queue && come[0].rank == arrives.rank);
      EXPECT_TRUE(come[0].fits(write.bytes, write.remote_offset));
    };
    const uint32_t n = exchange_bytes_;
    const uint64_t slot = worker.zero_copy() ? 16 : 32, result = worker.zero_copy() ? 48 : 64;
    fill(worker.gradients());
    one_way(worker.endpoint(), {queue}, {16, slot, n, 77}, box_->endpoint(queue), {.rank = rank});
    EXPECT_TRUE(
        std::ranges::equal(box_->slots(rank).subspan(slot, n), worker.gradients().subspan(16, n)));
    fill(box_->results());
    one_way(box_->endpoint(queue), {.rank = rank}, {48, result, n, 78}, worker.endpoint(), {queue});
    EXPECT_TRUE(
        std::ranges::equal(worker.results().subspan(result, n), box_->results().subspan(48, n)));
  }

  const uint64_t seed_ = testing::fresh_seeds(1).first;
  std::mt19937 random_{static_cast<uint32_t>(seed_)};
  uint32_t exchange_bytes_ = 100;
  std::unique_ptr<TransportRig> rig_;
  LinkLayout layout_;
  std::unique_ptr<BoxLink> box_;
  std::set<uint32_t> attached_;
};

}  // namespace phub
