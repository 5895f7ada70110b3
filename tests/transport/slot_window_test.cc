// The places of a core's gradients, alone and below a TCP endpoint.
#include "transport/slot_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/link_test.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "tests/transport/tcp_tls_rig.h"
#include "transport/shm/transport.h"
#include "transport/wire.h"

namespace phub {
namespace slot_window_test {

using testing::fresh_seeds;

constexpr uint32_t kBytes = 256;  // a slot

SlotWindow::Shape shape(uint32_t ranks, std::vector<uint32_t> queue_chunks, uint32_t places) {
  SlotWindow::Shape shape{.queue_chunks = std::move(queue_chunks),
                          .max_ranks = ranks,
                          .end_rank = ranks,
                          .places = places};
  uint64_t at = 0;
  for (const uint32_t chunks : shape.queue_chunks) {
    for (uint32_t i = 0; i < chunks; ++i, at += kBytes) shape.slots.push_back({at, kBytes});
  }
  return shape;
}

TEST(SlotWindow, AWriteHasToLieInTheSlotOfItsChunk) {
  const SlotWindow window(shape(1, {2, 3}, 1));
  EXPECT_TRUE(window.fits(0, 1, kBytes, kBytes));
  EXPECT_TRUE(window.fits(1, 0, 2 * kBytes + 100, kBytes - 100));
  EXPECT_FALSE(window.fits(0, 2, 2 * kBytes, 1));  // of queue 1
  EXPECT_FALSE(window.fits(2, 0, 0, 1));
  EXPECT_FALSE(window.fits(0, ~0u, 0, 1));
  EXPECT_FALSE(window.fits(0, 1, kBytes - 1, 1));
  EXPECT_FALSE(window.fits(0, 1, kBytes + 1, kBytes));
  EXPECT_FALSE(window.fits(0, 1, ~uint64_t{0} - 1, kBytes));
  EXPECT_FALSE(window.fits(0, 1, kBytes, ~uint64_t{0}));
}

TEST(SlotWindow, WhoFindsNoPlaceIsShortUntilOneIsFree) {
  SlotWindow window(shape(2, {3}, 1));
  std::byte* const first = window.take(0, 0, 0, 0);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(window.take(0, 0, 0, 10), first + 10);  // it has that place
  EXPECT_EQ(window.at(0, 0), first);
  EXPECT_FALSE(window.is_short());
  EXPECT_EQ(window.take(0, 0, 1, kBytes), nullptr);
  EXPECT_TRUE(window.is_short(0));
  EXPECT_FALSE(window.is_short(1));
  EXPECT_NE(window.take(1, 0, 1, kBytes), nullptr);  // places are each rank's own
  window.give_back(0, 2);                            // has none
  EXPECT_TRUE(window.is_short());
  window.give_back(0, 0);
  EXPECT_FALSE(window.is_short());
  EXPECT_EQ(window.at(0, 0), nullptr);
  EXPECT_EQ(window.take(0, 0, 2, 2 * kBytes), first);  // what was used lately
}

TEST(SlotWindow, OnlyWhoIsShortGetsMorePlaces) {
  SlotWindow window(shape(2, {3}, 1));
  ASSERT_NE(window.take(0, 0, 0, 0), nullptr);
  EXPECT_FALSE(window.has_room(0, 0, 1));
  ASSERT_NE(window.take(1, 0, 0, 0), nullptr);
  window.grow(2);
  EXPECT_EQ(window.grown(), 1u);
  EXPECT_FALSE(window.is_short());
  EXPECT_TRUE(window.has_room(0, 0, 1));
  EXPECT_FALSE(window.has_room(1, 0, 1));
  window.forget_shortage(1);
  EXPECT_FALSE(window.is_short());
}

TEST(SlotWindow, PlacesBeyondTheWindowGoOnceTheyAreGivenBack) {
  SlotWindow window(shape(1, {5}, 2));
  for (int i = 0; i < 3; ++i) {
    for (const uint32_t chunk : {0u, 1u})
      ASSERT_NE(window.take(0, 0, chunk, chunk * kBytes), nullptr);
    EXPECT_FALSE(window.has_room(0, 0, 2));
    window.grow(1);
    EXPECT_NE(window.take(0, 0, 2, 2 * kBytes), nullptr);
    window.give_back(0, 1);
    EXPECT_FALSE(window.has_room(0, 0, 3));
    window.give_back(0, 2);
    EXPECT_NE(window.take(0, 0, 3, 3 * kBytes), nullptr);
    EXPECT_FALSE(window.has_room(0, 0, 4));
    for (const uint32_t chunk : {0u, 3u}) window.give_back(0, chunk);
    EXPECT_FALSE(window.is_short());
  }
}

struct Limited {
  explicit Limited(uint64_t places) : limit(places * kPlace) { box.limit = &limit; }
  SlotWindow window(uint32_t ranks, uint32_t chunks, uint32_t places) {
    SlotWindow::Shape of = shape(ranks, {chunks}, places);
    of.box = &box;
    return SlotWindow(std::move(of));
  }

  static constexpr uint64_t kPlace = SlotWindow::place_bytes(kBytes);
  MemoryLimit limit;
  WindowsOfBox box{2};
};

TEST(SlotWindow, WhatItGrewByCountsUntilItIsGivenBack) {
  constexpr uint64_t kPlace = Limited::kPlace;
  MemoryLimit limit(100 * kPlace);
  {
    Limited of(0);
    of.box.limit = &limit;
    SlotWindow window = of.window(2, 5, 2);
    EXPECT_EQ(of.box.bytes, 2 * 2 * kPlace);
    for (const uint32_t chunk : {0u, 1u}) {
      ASSERT_NE(window.take(0, 0, chunk, chunk * kBytes), nullptr);
    }
    EXPECT_FALSE(window.has_room(0, 0, 2));
    EXPECT_TRUE(window.grow(3));
    EXPECT_EQ(of.box.bytes, 7 * kPlace);
    EXPECT_EQ(of.box.grown_bytes, 3 * kPlace);
    EXPECT_EQ(of.box.growths, 1u);
    EXPECT_EQ(limit.used(), 3 * kPlace);
    window.give_back(0, 0);
    EXPECT_EQ(of.box.bytes, 6 * kPlace);
    EXPECT_EQ(of.box.grown_bytes, 2 * kPlace);
    EXPECT_EQ(limit.used(), 2 * kPlace);
    EXPECT_FALSE(of.box.refused);
  }
  EXPECT_EQ(limit.used(), 0u);
}

TEST(SlotWindow, GrowsByWhatTheLimitHasRoomFor) {
  Limited of(2);
  SlotWindow window = of.window(2, 5, 1);
  for (const uint32_t rank : {0u, 1u}) {
    ASSERT_NE(window.take(rank, 0, 0, 0), nullptr);
    EXPECT_FALSE(window.has_room(rank, 0, 1));
  }
  EXPECT_FALSE(window.grow(3));
  EXPECT_TRUE(of.box.refused);
  EXPECT_EQ(of.box.growths, 1u);
  EXPECT_NE(window.take(0, 0, 1, kBytes), nullptr);
  EXPECT_NE(window.take(0, 0, 2, 2 * kBytes), nullptr);
  EXPECT_EQ(window.take(0, 0, 3, 3 * kBytes), nullptr);
  EXPECT_EQ(of.limit.used(), of.limit.limit());
  window.open(true);  // for a boundary, which ends only once everything is read
  EXPECT_NE(window.take(1, 0, 1, kBytes), nullptr);
  EXPECT_EQ(of.limit.excess(), SlotWindow::place_bytes(kBytes));
  window.open(false);
  window.give_back(0, 1);
  EXPECT_EQ(of.limit.used(), of.limit.limit());
}

// Against a map of what lies where.
TEST(SlotWindow, PlacesDoNotOverlap) {
  std::mt19937_64 random(fresh_seeds(1).first);
  constexpr uint32_t kRanks = 3, kChunks = 20;
  SlotWindow window(shape(kRanks, {kChunks}, 5));
  std::map<std::pair<uint32_t, uint32_t>, std::byte> content;
  for (int i = 0; i < 5000; ++i) {
    const auto rank = static_cast<uint32_t>(random() % kRanks);
    const auto chunk = static_cast<uint32_t>(random() % kChunks);
    if (random() % 2 == 0) {
      const auto value = static_cast<std::byte>(random());
      std::byte* const place = window.take(rank, 0, chunk, uint64_t{chunk} * kBytes);
      if (place == nullptr) {
        EXPECT_FALSE(content.contains({rank, chunk}));
        if (random() % 100 == 0) window.grow(3);
        continue;
      }
      std::memset(place, static_cast<int>(value), kBytes);
      content[{rank, chunk}] = value;
    } else {
      window.give_back(rank, chunk);
      content.erase({rank, chunk});
    }
    for (const auto& [who, value] : content) {
      const std::byte* const place = window.at(who.first, who.second);
      ASSERT_NE(place, nullptr);
      ASSERT_EQ(place[0], value);
      ASSERT_EQ(place[kBytes - 1], value);
    }
    for (uint32_t r = 0; r < kRanks; ++r) {
      ASSERT_EQ(window.at(r, chunk) != nullptr, content.contains({r, chunk}));
    }
  }
}

class WindowTest : public LinkTest {
 protected:
  void start(std::unique_ptr<TcpRig> rig, uint32_t ranks, uint32_t chunks, uint32_t places) {
    rig_ = std::move(rig);
    layout_.max_ranks = ranks;
    layout_.cores = 1;
    layout_.queue_chunks = {chunks};
    layout_.slots_bytes = layout_.results_bytes = uint64_t{chunks} * kBytes;
    layout_.windowed = true;
    SlotWindow::Shape of = shape(ranks, {chunks}, places);
    of.box = &windows_;
    window_ = std::make_unique<SlotWindow>(std::move(of));
    box_ = rig_->transport().open_job(layout_);
    box_->endpoint(0).use_window(*window_);
  }
  static void push(WorkerLink& worker, uint32_t chunk, std::byte value) {
    const uint64_t at = uint64_t{chunk} * kBytes;
    std::ranges::fill(worker.gradients().subspan(at, kBytes), value);
    ASSERT_TRUE(worker.endpoint().post({0}, {at, at, kBytes, encode({chunk, 1, ImmKind::kData})}));
    worker.endpoint().flush();
  }
  bool holds(uint32_t rank, uint32_t chunk, std::byte value) const {
    const std::byte* const at = window_->at(rank, chunk);
    return at != nullptr && std::all_of(at, at + kBytes, [&](std::byte b) { return b == value; });
  }

  MemoryLimit limit_{1000 * SlotWindow::place_bytes(kBytes)};
  WindowsOfBox windows_{4};
  std::unique_ptr<SlotWindow> window_;
};

enum class Payloads { kSockets, kTls, kNear };  // the last: through memory of one host

class WindowOverTcp : public WindowTest, public ::testing::WithParamInterface<Payloads> {
 protected:
  void start(uint32_t ranks, uint32_t chunks, uint32_t places) {
    const bool near = GetParam() == Payloads::kNear;
    auto rig = GetParam() == Payloads::kTls
                   ? make_tcp_tls_rig()
                   : std::make_unique<TcpRig>(TcpOptions(), TcpTrust(), nullptr, near);
    WindowTest::start(std::move(rig), ranks, chunks, places);
  }
};

INSTANTIATE_TEST_SUITE_P(, WindowOverTcp,
                         ::testing::Values(Payloads::kSockets, Payloads::kTls, Payloads::kNear),
                         [](const auto& info) {
                           return info.param == Payloads::kSockets ? "Sockets"
                                  : info.param == Payloads::kTls   ? "Tls"
                                                                   : "Near";
                         });

TEST_P(WindowOverTcp, WhatHasNoPlaceIsNotRead) {
  start(2, 3, 2);
  const auto worker = join(1, 1);
  BoxEndpoint& core = box_->endpoint(0);
  EXPECT_TRUE(box_->slots(1).empty());
  for (uint32_t chunk = 0; chunk < 3; ++chunk) push(*worker, chunk, std::byte(chunk + 5));
  EXPECT_EQ(poll(core, 2, &worker->endpoint()).size(), 2u);
  EXPECT_TRUE(poll(core, 0, &worker->endpoint()).empty());
  EXPECT_TRUE(holds(1, 0, std::byte{5}) && holds(1, 1, std::byte{6}));
  EXPECT_TRUE(window_->is_short(1));
  EXPECT_TRUE(core.arm({})) << "it does not spin until there is a place";
  core.disarm();
  window_->give_back(1, 1);
  const auto arrivals = poll(core, 1, &worker->endpoint());
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_TRUE(arrivals[0].fits(kBytes, 2 * kBytes));
  EXPECT_TRUE(holds(1, 0, std::byte{5}) && holds(1, 2, std::byte{7}));
}

TEST_P(WindowOverTcp, WhatOneRankHasNoPlaceForHoldsUpNoOther) {
  start(2, 3, 1);
  const auto one = join(0, 1), other = join(1, 1);
  BoxEndpoint& core = box_->endpoint(0);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) push(*one, chunk, std::byte{1});
  EXPECT_EQ(poll(core, 1, &one->endpoint()).size(), 1u);
  push(*other, 2, std::byte{2});
  const auto arrivals = poll(core, 1, &other->endpoint());
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals[0].rank, 1u);
  EXPECT_TRUE(holds(1, 2, std::byte{2}));
}

TEST_P(WindowOverTcp, WhatWhoIsGoneHadSentIsRead) {
  start(2, 3, 1);
  auto worker = join(1, 1);
  BoxEndpoint& core = box_->endpoint(0);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) push(*worker, chunk, std::byte{3});
  EXPECT_EQ(poll(core, 1, &worker->endpoint()).size(), 1u);
  EXPECT_TRUE(poll(core, 0, &worker->endpoint()).empty());
  worker.reset();
  const auto arrivals = poll(core, 3);
  ASSERT_EQ(arrivals.size(), 3u);
  EXPECT_TRUE(arrivals[0].ok && arrivals[1].ok);
  EXPECT_TRUE(!arrivals[2].ok && !arrivals[2].violation);
  for (uint32_t chunk = 0; chunk < 3; ++chunk) EXPECT_TRUE(holds(1, chunk, std::byte{3})) << chunk;
}

TEST_P(WindowOverTcp, WhatWhoIsGoneHadSentWaitsUntilTheLimitHasRoom) {
  windows_.limit = &limit_;
  limit_.take(1, limit_.limit());
  start(2, 2, 1);
  auto worker = join(1, 1);
  BoxEndpoint& core = box_->endpoint(0);
  for (uint32_t chunk = 0; chunk < 2; ++chunk) push(*worker, chunk, std::byte{3});
  EXPECT_EQ(poll(core, 1, &worker->endpoint()).size(), 1u);
  worker.reset();
  EXPECT_TRUE(poll(core, 0).empty());
  EXPECT_TRUE(core.arm({})) << "it does not spin until there is room";
  core.disarm();
  limit_.release(limit_.limit());
  const auto arrivals = poll(core, 2);
  ASSERT_EQ(arrivals.size(), 2u);
  EXPECT_TRUE(arrivals[0].ok && !arrivals[1].ok);
  EXPECT_TRUE(holds(1, 0, std::byte{3}) && holds(1, 1, std::byte{3}));
}

// A detached rank's places are given back by the core, and its next connection takes them.
TEST_P(WindowOverTcp, AWriteOutsideOfItsChunksSlotBreaksItsQueuePair) {
  start(1, 3, 3);
  uint32_t incarnation = 1;
  for (const auto& [at, bytes] :
       {std::pair{uint64_t{kBytes}, kBytes}, std::pair{uint64_t{1}, kBytes},
        std::pair{uint64_t{0}, kBytes + 1}}) {
    const auto worker = join(0, incarnation++);
    const Write write = {0, at, bytes, encode({0, 1, ImmKind::kData})};
    ASSERT_TRUE(worker->endpoint().post({0}, write));
    worker->endpoint().flush();
    const auto arrivals = poll(box_->endpoint(0), 1, &worker->endpoint());
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_TRUE(!arrivals[0].ok && arrivals[0].violation) << at << " " << bytes;
    drop(0);
  }
}

// The first part of a repeated gradient is here when its chunk is summed with the earlier one, and
// another chunk takes the place: nobody is to read what is left.
TEST_F(WindowTest, APayloadThatLostItsPlaceHalfwayIsDropped) {
  start(std::make_unique<TcpRig>(), 1, 3, 1);
  const Offer offer = box_->admit(0, 1);
  RawTcp raw(offer.queues[0].address);
  raw.send_struct(tcp_hello_of(offer, layout_, 0));
  handle();
  parse_tcp_answer(raw.receive());
  attach(0, 1);
  BoxEndpoint& core = box_->endpoint(0);
  const std::vector<std::byte> half(kBytes / 2, std::byte{7});
  raw.send_struct(TcpBatch{.first = {encode({1, 1, ImmKind::kData}), kBytes, kBytes}});
  raw.send(half);
  for (int i = 0; i < 1000 && !window_->has_place(0, 0, 1); ++i) poll(core, 0);
  ASSERT_TRUE(window_->has_place(0, 0, 1));
  poll(core, 0);
  window_->give_back(0, 1);
  ASSERT_NE(window_->take(0, 0, 2, 2 * kBytes), nullptr);
  window_->give_back(0, 2);
  raw.send(half);
  EXPECT_EQ(poll(core, 1).size(), 1u);
  EXPECT_EQ(window_->at(0, 1), nullptr);
  raw.send_struct(TcpBatch{.first = {encode({0, 1, ImmKind::kData}), kBytes, 0}});
  raw.send(half);
  raw.send(half);
  EXPECT_EQ(poll(core, 1).size(), 1u);
  EXPECT_TRUE(holds(0, 0, std::byte{7}));
}

// Chunks in any order, places given back in any order.
TEST_P(WindowOverTcp, EveryPayloadIsInItsPlace) {
  constexpr uint32_t kRanks = 3, kChunks = 40;
  start(kRanks, kChunks, 4);
  std::vector<std::unique_ptr<WorkerLink>> workers;
  std::array<std::vector<uint32_t>, kRanks> unsent;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    workers.push_back(join(rank, 1));
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) unsent[rank].push_back(chunk);
    std::ranges::shuffle(unsent[rank], random_);
  }
  const auto value_of = [](uint32_t rank, uint32_t chunk) { return std::byte(rank * 50 + chunk); };
  std::vector<std::pair<uint32_t, uint32_t>> held;
  uint32_t left = kRanks * kChunks;
  for (int i = 0; i < 1'000'000 && (left > 0 || !held.empty()); ++i) {
    const uint32_t rank = random_() % kRanks;
    Endpoint& worker = workers[rank]->endpoint();
    if (!unsent[rank].empty() && random_() % 2 == 0) {
      push(*workers[rank], unsent[rank].back(), value_of(rank, unsent[rank].back()));
      unsent[rank].pop_back();
    }
    worker.poll({});
    rig_->drive(worker);
    std::array<Arrival, 8> some;
    const size_t taken = box_->endpoint(0).poll(std::span(some).first(1 + random_() % 8));
    left -= static_cast<uint32_t>(taken);
    for (size_t j = 0; j < taken; ++j) {
      ASSERT_TRUE(some[j].ok);
      held.emplace_back(some[j].rank, decode(some[j].imm).chunk);
    }
    for (const auto& [r, chunk] : held) ASSERT_TRUE(holds(r, chunk, value_of(r, chunk)));
    if (held.empty() || random_() % 3 != 0) continue;
    std::swap(held[random_() % held.size()], held.back());
    window_->give_back(held.back().first, held.back().second);
    held.pop_back();
  }
  EXPECT_EQ(left, 0u);
}

// Over shared memory the slots are the workers' own.
TEST(SlotWindow, TransportsThatCannotSaySo) {
  EXPECT_EQ(make_shm_transport()->windows(), Windows::kNone);
  EXPECT_EQ(make_tcp_transport()->windows(), Windows::kPlaces);
}

}  // namespace slot_window_test
}  // namespace phub
