// The simulated network keeps the promises of reliable connections, and no others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/error.h"
#include "transport/sim/net.h"

namespace phub {
namespace sim_net_test {

constexpr uint32_t kSlot = 64;    // bytes of a chunk here
constexpr uint32_t kChunks = 16;  // per queue

// A job of two cores with one worker, rank 1, connected.
struct Link {
  explicit Link(const SimOptions& options, uint32_t near = SimNet::kNoBox) : net(options) {
    box = net.transport().open_job({.max_ranks = 3,
                                    .cores = 2,
                                    .queue_chunks = {kChunks, kChunks},
                                    .slots_bytes = 2 * kChunks * kSlot,
                                    .results_bytes = 2 * kChunks * kSlot,
                                    .core_node = {0, 0}});
    worker = net.connect(box->admit(1, 7), near);
    attach();
  }
  void attach() {
    for (uint32_t core : {0u, 1u}) box->endpoint(core).attach(1, 7);
    net.advance(10'000'000);
  }
  void detach() {
    for (uint32_t core : {0u, 1u}) box->endpoint(core).detach(1);
  }

  static Write chunk(uint32_t queue, uint32_t index) {
    const uint64_t offset = uint64_t{queue * kChunks + index} * kSlot;
    return {.local_offset = offset, .remote_offset = offset, .bytes = kSlot, .imm = index};
  }
  void fill(std::byte value) { std::ranges::fill(worker->gradients(), value); }
  bool landed(uint32_t queue, uint32_t index) {
    const uint64_t offset = chunk(queue, index).local_offset;
    return std::memcmp(box->slots(1).data() + offset, worker->gradients().data() + offset, kSlot) ==
           0;
  }

  SimNet net;
  std::unique_ptr<BoxLink> box;
  std::unique_ptr<WorkerLink> worker;
};

std::vector<Arrival> poll_all(Endpoint& endpoint) {
  std::vector<Arrival> all;
  Arrival batch[8];
  for (int empty = 0; empty < 3;) {
    const size_t n = endpoint.poll(batch);
    empty = n == 0 ? empty + 1 : 0;
    all.insert(all.end(), batch, batch + n);
  }
  return all;
}

size_t broken(std::span<const Arrival> arrivals) {
  return static_cast<size_t>(std::ranges::count(arrivals, false, &Arrival::ok));
}

TEST(SimNet, WritesArriveInOrderAndTheirPayloadFirst) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed, .loss = 0.3, .duplicate = 0.3, .early = 0.5, .retry_limit = 60});
    link.fill(std::byte{static_cast<uint8_t>(seed)});
    uint32_t next[2] = {0, 0};
    for (uint32_t i = 0; i < kChunks; ++i) {
      for (uint32_t q : {0u, 1u}) ASSERT_TRUE(link.worker->endpoint().post({q}, Link::chunk(q, i)));
    }
    link.worker->endpoint().flush();
    while (!link.net.idle()) {
      link.net.run_next();
      for (uint32_t q : {0u, 1u}) {
        for (const Arrival& arrival : poll_all(link.box->endpoint(q))) {
          EXPECT_TRUE(arrival.ok);
          EXPECT_EQ(arrival.rank, 1u);
          EXPECT_EQ(arrival.imm, next[q]++);
          EXPECT_TRUE(link.landed(q, arrival.imm));
        }
      }
    }
    EXPECT_EQ(next[0], kChunks);
    EXPECT_EQ(next[1], kChunks);
    EXPECT_GT(link.net.stats().lost, 0u);
    EXPECT_GT(link.net.stats().duplicates, 0u);
  }
}

TEST(SimNet, QueuePairsOvertakeEachOther) {
  bool second_first = false;
  for (uint64_t seed = 1; seed <= 50 && !second_first; ++seed) {
    Link link({.seed = seed});
    for (uint32_t q : {0u, 1u}) link.worker->endpoint().post({q}, Link::chunk(q, 0));
    link.worker->endpoint().flush();
    while (poll_all(link.box->endpoint(0)).empty()) {
      second_first |= !poll_all(link.box->endpoint(1)).empty();
      link.net.run_next();
    }
  }
  EXPECT_TRUE(second_first);
}

TEST(SimNet, TheSourceIsReadWhenTheWriteLands) {
  Link link({.seed = 3});
  link.fill(std::byte{1});
  link.worker->endpoint().post({0}, Link::chunk(0, 0));
  link.worker->endpoint().flush();
  link.fill(std::byte{2});
  link.net.advance(10'000'000);
  EXPECT_EQ(link.box->slots(1)[0], std::byte{2});
}

TEST(SimNet, NothingMovesBeforeTheFlush) {
  Link link({.seed = 4});
  EXPECT_TRUE(link.worker->endpoint().post({0}, Link::chunk(0, 0)));
  link.net.advance(10'000'000);
  EXPECT_TRUE(poll_all(link.box->endpoint(0)).empty());
  link.worker->endpoint().flush();
  link.net.advance(10'000'000);
  EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 1u);
}

TEST(SimNet, AFullQueueRefusesUntilWritesAreAcknowledged) {
  for (bool shared : {false, true}) {
    Link link({.seed = 5, .shared_memory = shared, .send_depth = 4});
    Endpoint& endpoint = link.worker->endpoint();
    for (uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(endpoint.post({0}, Link::chunk(0, i)));
    EXPECT_FALSE(endpoint.post({0}, Link::chunk(0, 4)));
    EXPECT_TRUE(endpoint.post({1}, Link::chunk(1, 0)));
    endpoint.flush();
    link.net.advance(10'000'000);
    EXPECT_EQ(endpoint.post({0}, Link::chunk(0, 4)), !shared) << "a ring is emptied by its reader";
    EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 4u);
    EXPECT_TRUE(endpoint.post({0}, Link::chunk(0, 5)));
  }
}

// Every outcome of a write in flight is seen: arrived, landed only, landed in part, never happened.
TEST(SimNet, ABreakLeavesWritesUnknown) {
  uint64_t arrived = 0, only_landed = 0, partly = 0, nothing = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed, .early = 0});
    link.fill(std::byte{9});
    const std::vector<std::byte> before(link.box->slots(1).begin(), link.box->slots(1).end());
    for (uint32_t i = 0; i < kChunks; ++i) link.worker->endpoint().post({0}, Link::chunk(0, i));
    link.worker->endpoint().flush();
    const bool both_whole = seed % 2 == 0;
    if (both_whole) link.net.advance(5'000);
    while (!link.net.break_queue_pair(*link.worker)) FAIL() << "nothing to break";
    // The other queue pair may have been hit: then everything arrives.
    link.net.advance(100'000'000);
    const std::vector<Arrival> at_box = poll_all(link.box->endpoint(0));
    const size_t data = at_box.size() - broken(at_box);
    EXPECT_EQ(broken(at_box) + broken(poll_all(link.box->endpoint(1))), 1u);
    EXPECT_EQ(broken(poll_all(link.worker->endpoint())), 1u);
    if (broken(at_box) == 0) continue;
    EXPECT_FALSE(link.worker->endpoint().post({0}, Link::chunk(0, 0)));
    for (uint32_t i = 0; i < kChunks; ++i) {
      const uint64_t at = Link::chunk(0, i).remote_offset;
      const bool untouched =
          std::memcmp(before.data() + at, link.box->slots(1).data() + at, kSlot) == 0;
      if (i < data) {
        EXPECT_EQ(at_box[i].imm, i);
        EXPECT_TRUE(link.landed(0, i));
        ++arrived;
      } else {
        ++(link.landed(0, i) ? only_landed : untouched ? nothing : partly);
      }
    }
    link.net.advance(100'000'000);
    EXPECT_TRUE(poll_all(link.box->endpoint(0)).empty());
    EXPECT_TRUE(poll_all(link.worker->endpoint()).empty());
  }
  EXPECT_GT(arrived, 0u);
  EXPECT_GT(only_landed, 0u);
  EXPECT_GT(partly, 0u);
  EXPECT_GT(nothing, 0u);
}

TEST(SimNet, LossPastTheRetryLimitBreaksTheQueuePair) {
  Link link({.seed = 6, .retry_limit = 3});
  link.net.set_loss(1);
  link.worker->endpoint().post({0}, Link::chunk(0, 0));
  link.worker->endpoint().flush();
  link.net.advance(100'000'000);
  EXPECT_EQ(broken(poll_all(link.worker->endpoint())), 1u);
  EXPECT_EQ(broken(poll_all(link.box->endpoint(0))), 1u);
}

TEST(SimNet, NothingArrivesAfterDetach) {
  uint32_t cut = 0;  // how often the detachment came in the middle
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed, .early = 0.5});
    link.fill(std::byte{1});
    for (uint32_t i = 0; i < kChunks; ++i) {
      ASSERT_TRUE(link.worker->endpoint().post({0}, Link::chunk(0, i)));
    }
    link.worker->endpoint().flush();
    link.net.advance(seed * 300);
    link.detach();
    const std::vector<std::byte> slots(link.box->slots(1).begin(), link.box->slots(1).end());
    const auto landed = std::ranges::count(slots, std::byte{1});
    cut += landed > 0 && landed < static_cast<ptrdiff_t>(slots.size() / 2);
    link.fill(std::byte{2});
    for (uint32_t i = 0; i < kChunks; ++i) {
      ASSERT_TRUE(link.worker->endpoint().post({1}, Link::chunk(1, i)));
    }
    link.worker->endpoint().flush();
    link.net.advance(100'000'000);
    EXPECT_TRUE(std::ranges::equal(slots, link.box->slots(1)));
    EXPECT_TRUE(poll_all(link.box->endpoint(0)).empty());
    EXPECT_TRUE(poll_all(link.box->endpoint(1)).empty());
    EXPECT_TRUE(link.worker->connected());
    link.box->revoke(1);
    link.net.advance(100'000'000);
    EXPECT_FALSE(link.worker->connected());
  }
  EXPECT_GT(cut, 10u);
}

TEST(SimNet, ReconnectionBringsNewQueuePairsOntoTheSameMemory) {
  Link link({.seed = 8});
  ASSERT_TRUE(link.net.break_queue_pair(*link.worker));
  link.net.advance(10'000'000);
  const std::byte* slots = link.box->slots(1).data();
  const std::byte* gradients = link.worker->gradients().data();
  link.detach();
  ASSERT_TRUE(link.box->can_reconnect());
  link.worker->reconnect(link.box->reconnect(1));
  link.attach();
  EXPECT_EQ(link.box->slots(1).data(), slots);
  EXPECT_EQ(link.worker->gradients().data(), gradients);
  for (uint32_t q : {0u, 1u}) EXPECT_TRUE(link.worker->endpoint().post({q}, Link::chunk(q, 3)));
  link.worker->endpoint().flush();
  link.net.advance(10'000'000);
  EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 1u);
  EXPECT_EQ(poll_all(link.box->endpoint(1)).size(), 1u);
}

TEST(SimNet, TicketsAreForOneUse) {
  Link link({.seed = 9});
  const Offer offer = link.box->admit(2, 1);
  auto second = link.net.connect(offer);
  auto code_of = [&](const Offer& o) {
    try {
      link.net.connect(o);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of(offer), ErrorCode::kUnauthorized);
  EXPECT_EQ(code_of({"sim", "", "0123456789abcdef0123456789abcdef"}), ErrorCode::kUnauthorized);
  link.box->revoke(2);
  EXPECT_EQ(code_of(offer), ErrorCode::kUnauthorized);
}

TEST(SimNet, AForgedOffsetBreaksTheQueuePairAndChangesNothing) {
  Link link({.seed = 10, .early = 1});
  const std::vector<std::byte> slots(link.box->slots(1).begin(), link.box->slots(1).end());
  for (uint64_t offset : {2 * kChunks * kSlot - kSlot + 1ull, ~0ull - 3}) {
    link.worker->endpoint().post(
        {0}, {.local_offset = 0, .remote_offset = offset, .bytes = kSlot, .imm = 1});
  }
  link.worker->endpoint().flush();
  link.net.advance(100'000'000);
  const std::vector<Arrival> arrivals = poll_all(link.box->endpoint(0));
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_FALSE(arrivals[0].ok);
  EXPECT_EQ(broken(poll_all(link.worker->endpoint())), 1u);
  EXPECT_TRUE(std::ranges::equal(slots, link.box->slots(1)));
}

TEST(SimNet, ACrashIsSeenUnlessItsHostDiedToo) {
  for (bool silent : {false, true}) {
    Link link({.seed = 11});
    std::vector<TransportEvent> events;
    link.net.transport().handle_events(events);
    ASSERT_TRUE(events.empty());
    link.worker->endpoint().post({0}, Link::chunk(0, 0));
    link.worker->endpoint().flush();
    link.net.crash(*link.worker, silent);
    link.net.advance(10'000'000);
    link.net.transport().handle_events(events);
    ASSERT_EQ(events.size(), silent ? 0u : 1u);
    if (!silent) {
      EXPECT_EQ(events[0].kind, TransportEvent::kDisconnected);
      EXPECT_EQ(events[0].rank, 1u);
      EXPECT_EQ(events[0].incarnation, 7u);
    }
    // Whoever sends to it finds out.
    poll_all(link.box->endpoint(1));
    EXPECT_TRUE(link.box->endpoint(0).post({.rank = 1}, Link::chunk(0, 0)) || !silent);
    link.net.advance(100'000'000);
    EXPECT_EQ(broken(poll_all(link.box->endpoint(0))), 1u);
    link.worker.reset();
    link.net.advance(100'000'000);
  }
}

TEST(SimNet, SharedMemoryMovesImmediatesOnly) {
  Link link({.seed = 12, .shared_memory = true});
  EXPECT_TRUE(link.worker->zero_copy());
  EXPECT_TRUE(link.box->slots_belong_to_worker());
  EXPECT_FALSE(link.box->can_reconnect());
  EXPECT_FALSE(link.net.break_queue_pair(*link.worker));
  EXPECT_EQ(link.worker->gradients().data(), link.box->slots(1).data());
  EXPECT_EQ(link.worker->results().data(), link.box->results().data());
  link.box->endpoint(1).post({.rank = 1}, Link::chunk(1, 2));
  link.box->endpoint(1).flush();
  link.net.advance(10'000'000);
  const std::vector<Arrival> arrivals = poll_all(link.worker->endpoint());
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals[0].queue, 1u);
  EXPECT_EQ(arrivals[0].imm, 2u);
}

// Within a host nothing is lost or overtaken. The box copies: when it polls, and before it tells.
TEST(SimNet, AWorkerOnTheBoxsHostExchangesWithItOverMemory) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed, .loss = 1, .early = 1, .break_chance = 1, .overtake = 1}, 0);
    Endpoint& worker = link.worker->endpoint();
    BoxEndpoint& box = link.box->endpoint(0);
    EXPECT_FALSE(worker.crosses_nic({.queue = 1}));
    EXPECT_FALSE(box.crosses_nic({.rank = 1}));
    EXPECT_EQ(link.worker->nic_of(0), "");
    link.fill(std::byte{1});
    std::ranges::fill(link.box->results(), std::byte{2});
    const std::vector<std::byte> slots(link.box->slots(1).begin(), link.box->slots(1).end());
    for (uint32_t i = 0; i < kChunks; ++i) {
      ASSERT_TRUE(worker.post({0}, Link::chunk(0, i)));
      ASSERT_TRUE(box.post({.rank = 1}, Link::chunk(0, i)));
    }
    worker.flush();
    box.flush();
    for (size_t byte = 0; byte < kChunks * kSlot; ++byte) {
      ASSERT_EQ(link.worker->results()[byte], std::byte{2}) << "before it is told";
    }
    std::ranges::fill(link.box->results(), std::byte{3});
    link.net.advance(1'000'000'000);
    EXPECT_TRUE(std::ranges::equal(slots, link.box->slots(1))) << "before it is polled";
    link.fill(std::byte{4});
    for (const auto& arrivals : {poll_all(box), poll_all(worker)}) {
      ASSERT_EQ(arrivals.size(), kChunks);
      for (uint32_t i = 0; i < kChunks; ++i) {
        EXPECT_TRUE(arrivals[i].ok);
        EXPECT_EQ(arrivals[i].imm, i);
      }
    }
    EXPECT_EQ(link.box->slots(1)[0], std::byte{4});
    EXPECT_EQ(link.worker->results()[0], std::byte{2});
    EXPECT_EQ(link.net.stats().near_writes, 2 * kChunks);
  }
}

TEST(SimNet, ThereIsRoomAgainWithinAHostWhenTheOtherSideHasPolled) {
  Link link({.seed = 14, .send_depth = 2}, 0);
  Endpoint& worker = link.worker->endpoint();
  const std::vector<uint32_t> fifth = {0, 5, 0};
  ASSERT_TRUE(link.box->endpoint(0).arm(fifth));
  for (uint32_t i = 0; i < 2; ++i) ASSERT_TRUE(worker.post({0}, Link::chunk(0, i)));
  EXPECT_FALSE(worker.post({0}, Link::chunk(0, 2)));
  worker.flush();
  ASSERT_TRUE(worker.arm({}));
  link.net.advance(10'000'000);
  EXPECT_FALSE(worker.post({0}, Link::chunk(0, 2)));
  EXPECT_TRUE(SimNet::awake(link.box->endpoint(0))) << "no more can come";
  link.box->endpoint(0).disarm();
  EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 2u);
  EXPECT_TRUE(SimNet::awake(worker));
  worker.disarm();
  EXPECT_TRUE(worker.post({0}, Link::chunk(0, 2)));
}

// What is under way to the box is not in its slots.
TEST(SimNet, AConnectionWithinAHostThatBreaksIsMadeAgain) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed}, 0);
    const std::vector<std::byte> slots(link.box->slots(1).begin(), link.box->slots(1).end());
    link.fill(std::byte{1});
    for (uint32_t i = 0; i < 5; ++i) link.worker->endpoint().post({0}, Link::chunk(0, i));
    link.worker->endpoint().flush();
    while (link.net.break_queue_pair(*link.worker)) {
    }
    link.net.advance(10'000'000);
    EXPECT_TRUE(std::ranges::equal(slots, link.box->slots(1)));
    const std::vector<Arrival> arrivals = poll_all(link.box->endpoint(0));
    EXPECT_EQ(broken(arrivals), 1u);
    for (const Arrival& arrival : arrivals) {
      if (arrival.ok) {
        EXPECT_TRUE(link.landed(0, arrival.imm));
      }
    }
    EXPECT_EQ(broken(poll_all(link.worker->endpoint())), 2u);
    link.detach();
    link.worker->reconnect(link.box->reconnect(1));
    link.attach();
    EXPECT_FALSE(link.worker->endpoint().crosses_nic({.queue = 0}));
    link.worker->endpoint().post({0}, Link::chunk(0, 7));
    link.worker->endpoint().flush();
    link.net.advance(10'000'000);
    EXPECT_FALSE(link.landed(0, 7));
    EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 1u);
    EXPECT_TRUE(link.landed(0, 7));
  }
}

TEST(SimNet, ABoxOnItsHostAlwaysHearsThatAWorkerHasEnded) {
  Link link({.seed = 15}, 0);
  std::vector<TransportEvent> events;
  link.net.transport().handle_events(events);
  link.net.crash(*link.worker, /*silent=*/true);
  link.net.advance(10'000'000);
  link.net.transport().handle_events(events);
  EXPECT_EQ(events.size(), 1u);
  EXPECT_EQ(broken(poll_all(link.box->endpoint(0))), 1u);
  EXPECT_EQ(broken(poll_all(link.box->endpoint(1))), 1u);
}

// A job that two boxes have parts of, one of them on the worker's host.
TEST(SimNet, AWorkersQueuesMayBeNearAndFar) {
  SimNet net({.seed = 16});
  std::vector<std::unique_ptr<BoxLink>> boxes;
  Offer offer;
  for (uint32_t box = 0; box < 2; ++box) {
    boxes.push_back(net.transport(box).open_job({.max_ranks = 1,
                                                 .cores = 1,
                                                 .queue_chunks = {kChunks},
                                                 .all_queues = 2,
                                                 .first_queue = box,
                                                 .slots_bytes = kChunks * kSlot,
                                                 .results_bytes = kChunks * kSlot,
                                                 .worker_gradients_bytes = 2 * kChunks * kSlot,
                                                 .worker_results_bytes = 2 * kChunks * kSlot,
                                                 .core_node = {0}}));
    if (box > 0) boxes[box]->use_ticket(offer.ticket);
    const Offer part = boxes[box]->admit(0, 1);
    if (box == 0) offer = part;
    if (box > 0) offer.queues.push_back(part.queues.front());
    boxes[box]->endpoint(0).attach(0, 1);
  }
  const auto worker = net.connect(offer, /*near=*/1);
  net.advance(10'000'000);
  EXPECT_EQ(net.stats().mixed_links, 1u);
  EXPECT_EQ(net.stats().near_links, 0u);
  EXPECT_TRUE(worker->endpoint().crosses_nic({.queue = 0}));
  EXPECT_FALSE(worker->endpoint().crosses_nic({.queue = 1}));
  EXPECT_NE(worker->nic_of(0), worker->nic_of(1));
  std::ranges::fill(worker->gradients(), std::byte{9});
  for (uint32_t queue = 0; queue < 2; ++queue) {
    ASSERT_TRUE(worker->endpoint().post(
        {queue}, {.local_offset = queue * kSlot, .bytes = kSlot, .imm = queue}));
  }
  worker->endpoint().flush();
  net.advance(10'000'000);
  for (uint32_t box = 0; box < 2; ++box) {
    EXPECT_EQ(boxes[box]->slots(0)[0] == std::byte{9}, box == 0) << "before it is polled";
    ASSERT_EQ(poll_all(boxes[box]->endpoint(0)).size(), 1u);
    EXPECT_EQ(boxes[box]->slots(0)[0], std::byte{9});
  }
}

TEST(SimNet, AnArmedEndpointIsWokenAsAsked) {
  Link link({.seed = 13});
  BoxEndpoint& endpoint = link.box->endpoint(0);
  EXPECT_TRUE(SimNet::awake(endpoint));
  auto send = [&](uint32_t index) {
    link.worker->endpoint().post({0}, Link::chunk(0, index));
    link.worker->endpoint().flush();
    link.net.advance(10'000'000);
  };
  const std::vector<uint32_t> third = {0, 3, 0}, never = {0, 0, 0};
  ASSERT_TRUE(endpoint.arm(third));
  for (uint32_t i = 0; i < 2; ++i) send(i);
  EXPECT_FALSE(SimNet::awake(endpoint));
  send(2);
  EXPECT_TRUE(SimNet::awake(endpoint));
  endpoint.disarm();
  EXPECT_FALSE(endpoint.arm(third)) << "three arrivals are waiting";
  poll_all(endpoint);
  ASSERT_TRUE(endpoint.arm(never));
  send(3);
  EXPECT_FALSE(SimNet::awake(endpoint));
  link.net.break_queue_pair(*link.worker);
  link.net.break_queue_pair(*link.worker);
  link.net.advance(10'000'000);
  EXPECT_TRUE(SimNet::awake(endpoint)) << "a broken queue pair wakes in any case";
}

// What the box has on the device is lost; letting go of it works, as do the other cores.
TEST(SimNet, ADeviceThatDiesIsAnErrorOfItsEndpointAndOfNoOther) {
  Link link({.seed = 19});
  BoxEndpoint& endpoint = link.box->endpoint(1);
  ASSERT_TRUE(endpoint.arm({}));
  ASSERT_TRUE(link.net.fail_device(*link.worker, 1, /*said=*/false));
  EXPECT_TRUE(SimNet::awake(endpoint)) << "whoever sleeps on it has to hear of it";
  endpoint.disarm();
  std::array<Arrival, 4> some;
  EXPECT_THROW(endpoint.poll(some), Error);
  EXPECT_THROW(endpoint.arm({}), Error);
  EXPECT_THROW(endpoint.post({.rank = 1}, Link::chunk(1, 0)), Error);
  link.worker->endpoint().post({0}, Link::chunk(0, 2));
  link.worker->endpoint().flush();
  link.net.advance(10'000'000);
  EXPECT_EQ(poll_all(link.box->endpoint(0)).size(), 1u);
  std::vector<TransportEvent> events;
  link.net.transport().handle_events(events);
  EXPECT_FALSE(std::ranges::any_of(
      events, [](const TransportEvent& event) { return event.kind == TransportEvent::kFailed; }));

  ASSERT_TRUE(link.net.fail_device(*link.worker, 0, /*said=*/true));
  events.clear();
  link.net.transport().handle_events(events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, TransportEvent::kFailed);
  EXPECT_EQ(events[0].link, link.box.get());
  EXPECT_NE(events[0].reason.find("core 0"), std::string::npos);
  link.detach();
  link.box->revoke(1);
}

// Both ways; each arrives once, with its payload, however they overtake each other.
TEST(SimNet, WritesOfOneQueuePairMayOvertakeEachOther) {
  uint64_t overtakes = 0;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    Link link({.seed = seed, .loss = 0.3, .early = 0.5, .overtake = 0.5, .retry_limit = 60});
    link.fill(std::byte{static_cast<uint8_t>(seed)});
    std::vector<uint32_t> to_box, to_worker;
    for (uint32_t i = 0; i < kChunks; ++i) {
      ASSERT_TRUE(link.worker->endpoint().post({0}, Link::chunk(0, i)));
      ASSERT_TRUE(link.box->endpoint(0).post({.rank = 1}, Link::chunk(0, i)));
    }
    link.worker->endpoint().flush();
    link.box->endpoint(0).flush();
    while (!link.net.idle()) {
      link.net.run_next();
      for (const Arrival& arrival : poll_all(link.box->endpoint(0))) {
        ASSERT_TRUE(arrival.ok);
        EXPECT_TRUE(link.landed(0, arrival.imm));
        to_box.push_back(arrival.imm);
      }
      for (const Arrival& arrival : poll_all(link.worker->endpoint())) {
        to_worker.push_back(arrival.imm);
      }
    }
    for (std::vector<uint32_t>* seen : {&to_box, &to_worker}) {
      ASSERT_EQ(seen->size(), kChunks);
      EXPECT_FALSE(std::ranges::is_sorted(*seen));
      std::ranges::sort(*seen);
      EXPECT_EQ(std::ranges::adjacent_find(*seen), seen->end());
    }
    overtakes += link.net.stats().overtakes;
  }
  EXPECT_GT(overtakes, 500u);
}

uint64_t busy_trace(uint64_t seed) {
  Link link({.seed = seed, .loss = 0.1, .duplicate = 0.1, .break_chance = 0.01});
  for (uint32_t i = 0; i < 200; ++i) {
    link.worker->endpoint().post({i % 2}, Link::chunk(i % 2, i % kChunks));
    link.box->endpoint(i % 2).post({.rank = 1}, Link::chunk(i % 2, i % kChunks));
    link.worker->endpoint().flush();
    link.box->endpoint(i % 2).flush();
    link.net.advance(link.net.random().below(20'000));
    poll_all(link.worker->endpoint());
    poll_all(link.box->endpoint(i % 2));
  }
  return link.net.trace_hash();
}

TEST(SimNet, TheSameSeedGivesTheSameTrace) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(busy_trace(seed), busy_trace(seed)) << "seed " << seed;
    EXPECT_NE(busy_trace(seed), busy_trace(seed + 1)) << "seed " << seed;
  }
}

}  // namespace sim_net_test
}  // namespace phub
