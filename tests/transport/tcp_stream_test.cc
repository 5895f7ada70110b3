// What goes through TCP connections: frames in pieces, frames that cannot be, connections that
// break in the middle of one and are made again, and what it costs in system calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <limits>
#include <random>

#include "tests/transport/tcp_frames.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "transport/tcp/endpoint.h"

namespace phub {
namespace tcp_stream_test {

std::vector<std::byte> noise(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

class TcpStreamTest : public TcpFramesTest {
 protected:
  TcpStreamTest() { rig_ = std::make_unique<TcpRig>(); }
  // A worker by hand, connected on queue 0 and attached.
  std::unique_ptr<RawTcp> join_raw(uint32_t rank, uint32_t incarnation) {
    const Offer offer = box_->admit(rank, incarnation);
    auto raw = std::make_unique<RawTcp>(offer.queues[0].address);
    raw->send_struct(tcp_hello_of(offer, layout_, 0));
    handle();
    parse_tcp_answer(raw->receive());
    attach(rank, incarnation);
    return raw;
  }
  static const TcpCounters& counters(Endpoint& endpoint) {
    return dynamic_cast<TcpEndpoint&>(endpoint).tcp_counters();
  }
};

TEST_F(TcpStreamTest, FramesArriveWholeHoweverTheyAreCut) {
  open(2, 1, 1000, 64);
  const auto raw = join_raw(1, 1);
  expect_whole(noise(1000, 1), false, [&](auto bytes) { raw->send(bytes); });
}

// Nothing of a batch lands of which one frame cannot be.
TEST_F(TcpStreamTest, ABatchThatCannotBeBreaksItsQueuePair) {
  open(1, 1, 1000);
  const TcpFrame good = {7, 4, 0};
  uint32_t incarnation = 1;
  struct Case {
    TcpBatch batch;
    std::vector<TcpFrame> table;
  };
  for (const Case& bad : {Case{{.more = kTcpMaxBatch, .first = good}, {}},
                          Case{{.more = 0, .reserved = 1, .first = good}, {}},
                          Case{{.more = 0xffffffff, .first = good}, {}},
                          Case{{.more = 2, .first = good}, {good, {8, 4, 997}}}}) {
    const auto raw = join_raw(0, incarnation++);
    raw->send_struct(bad.batch);
    raw->send(std::as_bytes(std::span(bad.table)));
    raw->send(noise(12, 1));
    const auto arrivals = poll(box_->endpoint(0), 1);
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_FALSE(arrivals[0].ok);
    EXPECT_TRUE(arrivals[0].violation) << "no connection that may be made again";
    for (const std::byte byte : box_->slots(0)) ASSERT_EQ(byte, std::byte{0});
    detach(0);
    box_->revoke(0);
  }
}

TEST_F(TcpStreamTest, AFrameOutsideTheSlotsBreaksItsQueuePairOnly) {
  open(2, 1, 1000);
  auto bystander = join(0, 1);
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  uint32_t incarnation = 1;
  for (const TcpFrame& bad :
       {TcpFrame{7, 1, 1000}, TcpFrame{7, 1001, 0}, TcpFrame{7, 2, 999}, TcpFrame{7, 2, kMost},
        TcpFrame{7, 0xffffffff, 8}, TcpFrame{7, 0, 1001}, TcpFrame{7, 8, kMost - 3}}) {
    const auto raw = join_raw(1, incarnation++);
    const std::vector<std::byte> before(box_->slots(1).begin(), box_->slots(1).end());
    raw->send_frame({3, 0, 1000}, {});  // is just inside
    raw->send_frame(bad, noise(500, 3));
    const auto arrivals = poll(box_->endpoint(0), 2);
    ASSERT_EQ(arrivals.size(), 2u) << bad.remote_offset;
    EXPECT_TRUE(arrivals[0].ok && arrivals[0].imm == 3);
    EXPECT_FALSE(arrivals[1].ok);
    EXPECT_TRUE(arrivals[1].violation);
    EXPECT_EQ(arrivals[1].rank, 1u);
    EXPECT_TRUE(poll(box_->endpoint(0), 0).empty()) << "said once";
    EXPECT_TRUE(std::equal(before.begin(), before.end(), box_->slots(1).begin()));
    EXPECT_FALSE(box_->endpoint(0).post({.rank = 1}, {0, 0, 10, 1}));
    EXPECT_TRUE(raw->receive().empty() && raw->ended()) << "the peer is told";
    detach(1);
    box_->revoke(1);
  }
  ASSERT_TRUE(bystander->endpoint().post({0}, {0, 0, 1000, 5}));
  bystander->endpoint().flush();
  EXPECT_EQ(poll(box_->endpoint(0), 1).size(), 1u);
  EXPECT_TRUE(bystander->connected());

  // The worker checks the box as well.
  ASSERT_TRUE(box_->endpoint(0).post({.rank = 0}, {0, 999, 2, 5}));
  box_->endpoint(0).flush();
  const auto arrivals = poll(bystander->endpoint(), 1);
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_FALSE(arrivals[0].ok);
  EXPECT_FALSE(bystander->connected());
}

std::pair<Fd, Fd> socket_pair() {
  std::array<int, 2> ends;
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}
void open(TcpEndpoint& endpoint, QueuePair pair, const Fd& socket, std::span<Write> ring,
          std::span<std::byte> memory) {
  endpoint.watch(socket.get(), pair);
  endpoint.list(pair);
  endpoint.open(pair, {.stream = {socket.get()}, .ring = ring, .source = memory, .target = memory});
}
// An endpoint of several connections, each over a pair of sockets.
struct Connections {
  Connections(uint32_t queues, size_t ring_entries, std::span<std::byte> memory)
      : endpoint(queues, 1), rings(queues, std::vector<Write>(ring_entries)) {
    for (uint32_t q = 0; q < queues; ++q) {
      pairs.push_back(socket_pair());
      open(endpoint, {q}, pairs[q].first, rings[q], memory);
    }
  }
  TcpEndpoint endpoint;
  std::vector<std::vector<Write>> rings;
  std::vector<std::pair<Fd, Fd>> pairs;  // here, there
};

// The control thread hands a connection over, and announces it. In between the core may have found
// it by itself, seen it end, and let go of it.
TEST_F(TcpStreamTest, AConnectionMayEndBetweenItsHandOverAndItsAnnouncement) {
  std::vector<std::byte> memory(8);
  std::vector<Write> ring(16);
  auto [here, there] = socket_pair();
  TcpEndpoint endpoint(1, 1);
  tcp_stream_test::open(endpoint, {}, here, ring, memory);
  there.reset();
  const auto arrivals = poll(endpoint, 1);
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_FALSE(arrivals[0].ok);
  EXPECT_FALSE(arrivals[0].violation);
  endpoint.close({});
  endpoint.announce(here.get(), {});
  EXPECT_TRUE(poll(endpoint, 0).empty());
}

// Nobody reads from one of two connections to a peer. It is soon refused posts, and the other gets
// no further ahead than a write at a time.
TEST_F(TcpStreamTest, AnEndpointHoldsLittleForAPeer) {
  constexpr uint32_t kBytes = 32 << 10, kWrites = 64;
  std::vector<std::byte> memory(kBytes);
  Connections connections(2, kWrites, memory);
  TcpEndpoint& endpoint = connections.endpoint;
  const auto& pairs = connections.pairs;
  uint32_t posted = 0;  // to both in turn
  const auto post = [&] {
    while (posted < 2 * kWrites && endpoint.post({posted % 2}, {0, 0, kBytes, posted})) ++posted;
    endpoint.flush();
  };
  std::vector<std::byte> read(1 << 20);
  const auto drain = [&](uint32_t q) {
    uint64_t bytes = 0;
    for (int idle = 0; idle < 3; ++idle) {
      post();
      poll(endpoint, 0);
      for (ssize_t n = 0; (n = recv(pairs[q].second.get(), read.data(), read.size(), 0)) > 0;
           idle = 0) {
        bytes += static_cast<uint64_t>(n);
      }
    }
    return bytes;
  };
  const uint64_t ahead = drain(1);
  int buffer = 0;  // at the other end of the one that nobody reads from
  socklen_t size = sizeof buffer;
  getsockopt(pairs[0].first.get(), SOL_SOCKET, SO_SNDBUF, &buffer, &size);
  EXPECT_GE(ahead, kRingBytes / 2);
  EXPECT_LE(ahead, static_cast<uint64_t>(buffer) + kRingBytes + 2 * kBytes);
  endpoint.arm({});  // what has become of posts so far does not count
  EXPECT_FALSE(endpoint.post({0}, {0, 0, kBytes, 0}));
  EXPECT_TRUE(endpoint.arm({})) << "there is no room yet";
  EXPECT_TRUE(endpoint.post({1}, {0, 0, kBytes, 0}));
  EXPECT_FALSE(endpoint.post({1}, {0, 0, kBytes, 0}));
  uint64_t behind = 0;
  bool found_room = false;
  for (int turn = 0; turn < 100 && !found_room; ++turn) {
    const ssize_t n = recv(pairs[0].second.get(), read.data(), read.size(), 0);
    behind += static_cast<uint64_t>(std::max<ssize_t>(n, 0));
    found_room = !endpoint.arm({});
  }
  EXPECT_TRUE(found_room);
  for (int turn = 0; turn < 100; ++turn) behind += drain(0) + drain(1);
  EXPECT_EQ(posted, 2 * kWrites) << "what was refused goes on";
  EXPECT_GE(ahead + behind, uint64_t{2 * kWrites} * kBytes);
}

// Writes that are larger than what is held at once: each connection may have one.
TEST_F(TcpStreamTest, LargeWritesGoOnAllConnectionsAtOnce) {
  constexpr uint32_t kBytes = 2 * kRingBytes, kQueues = 3;
  std::vector<std::byte> memory(kBytes);
  Connections connections(kQueues, 4, memory);
  for (uint32_t q = 0; q < kQueues; ++q) {
    EXPECT_TRUE(connections.endpoint.post({q}, {0, 0, kBytes, q})) << q;
    EXPECT_FALSE(connections.endpoint.post({q}, {0, 0, kBytes, q})) << q;
  }
}

uint64_t told_ns = 0;  // what a clock of a test says

// Rank 1 is slow; rank 0 is read from as far as it may be ahead, until rank 1 stops altogether.
TEST_F(TcpStreamTest, NoRankIsFarAheadOfOneThatDelivers) {
  constexpr uint32_t kBytes = 1000, kLead = 2, kChunks = 16;
  told_ns = 1'000'000'000;
  std::vector<std::byte> memory(kBytes);
  std::vector<std::vector<Write>> rings(4, std::vector<Write>(kChunks));
  std::vector<std::pair<Fd, Fd>> pairs;
  TcpEndpoint box(1, 2);
  box.keep_in_step(kLead, [] { return told_ns; });
  std::vector<std::unique_ptr<TcpEndpoint>> workers;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    pairs.push_back(socket_pair());
    workers.push_back(std::make_unique<TcpEndpoint>(1, 1));
    tcp_stream_test::open(box, {.queue = 0, .rank = rank}, pairs[rank].first, rings[rank], memory);
    tcp_stream_test::open(*workers[rank], {}, pairs[rank].second, rings[2 + rank], memory);
  }
  const auto send = [&](uint32_t rank, uint32_t chunk) {
    ASSERT_TRUE(workers[rank]->post({}, {0, 0, kBytes, encode({chunk, 1, ImmKind::kData})}));
    workers[rank]->flush();
  };
  const auto answer = [&](uint32_t rank, uint32_t chunk) {
    ASSERT_TRUE(box.post({.rank = rank}, {0, 0, kBytes, encode({chunk, 1, ImmKind::kData})}));
    box.flush();
  };
  std::array<size_t, 2> came = {};
  const auto take = [&] {
    for (const Arrival& arrival : poll(box, 0)) ++came[arrival.rank];
  };
  send(1, 0);
  take();
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) send(0, chunk);
  take();
  EXPECT_EQ(came, (std::array<size_t, 2>{1 + kLead + 1, 1}));
  EXPECT_TRUE(box.arm({})) << "what it does not read yet is no work";
  pollfd woken = {box.wake_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&woken, 1, 60'000), 1) << "and may be some time";
  box.disarm();
  send(1, 1);
  take();
  EXPECT_EQ(came, (std::array<size_t, 2>{2 + kLead + 1, 2}));
  for (const uint32_t rank : {0, 1}) answer(rank, 0);
  take();
  EXPECT_EQ(came[0], 2 + kLead + 1) << "both have come as much nearer";
  told_ns += 1'000'000'000;
  take();
  EXPECT_EQ(came, (std::array<size_t, 2>{kChunks, 2})) << "nobody waits for who stands still";
}

TEST_F(TcpStreamTest, AChunkThatStopsHalfWayIsNeverAnnounced) {
  open(1, 1, 1000);
  auto raw = join_raw(0, 1);
  raw->send_frame({1, 100, 0}, noise(100, 4));
  raw->send_frame({2, 100, 100}, noise(99, 5));
  EXPECT_EQ(poll(box_->endpoint(0), 1).size(), 1u);
  EXPECT_TRUE(poll(box_->endpoint(0), 0).empty());
  EXPECT_TRUE(box_->endpoint(0).arm({})) << "waiting for the rest is no work";
  box_->endpoint(0).disarm();
  raw->close();
  const auto arrivals = poll(box_->endpoint(0), 1);
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_FALSE(arrivals[0].ok);
  EXPECT_TRUE(poll(box_->endpoint(0), 0).empty());
}

// The end makes one event, together with what was sent before it.
TEST_F(TcpStreamTest, TheEndIsSeenBehindTheLastBytes) {
  open(1, 1, 1000);
  auto raw = join_raw(0, 1);
  poll(box_->endpoint(0), 0);
  raw->send_frame({1, 100, 0}, noise(100, 4));
  raw->send_frame({2, 100, 100}, noise(50, 5));
  raw->close();
  rig_->pump();
  const auto arrivals = poll(box_->endpoint(0), 2);
  ASSERT_EQ(arrivals.size(), 2u);
  EXPECT_TRUE(arrivals[0].ok);
  EXPECT_FALSE(arrivals[1].ok);
}

TEST_F(TcpStreamTest, AReplacedWorkersOpenSocketChangesNothing) {
  open(1, 1, 1 << 20);
  const auto old = join_raw(0, 1);
  old->send_frame({1, 1000, 0}, noise(500, 6));  // half of it is still to come
  EXPECT_TRUE(poll(box_->endpoint(0), 0).empty());
  const std::vector<std::byte> fenced(box_->slots(0).begin(), box_->slots(0).end());
  const auto unchanged = [&] {
    EXPECT_TRUE(poll(box_->endpoint(0), 0).empty());
    return std::equal(fenced.begin(), fenced.end(), box_->slots(0).begin());
  };
  detach(0);
  old->send(noise(500, 7));
  old->send_frame({2, 1000, 4096}, noise(1000, 8));
  EXPECT_TRUE(unchanged()) << "between detach and revoke";
  EXPECT_TRUE(old->receive().empty() && !old->ended()) << "the end comes with the revocation";
  box_->revoke(0);
  auto successor = join(0, 2);
  old->send_frame({3, 1000, 8192}, noise(1000, 9));
  EXPECT_TRUE(unchanged()) << "after the successor came";
  old->receive();
  EXPECT_TRUE(old->ended());
  EXPECT_TRUE(successor->connected());
}

// The chunk is larger than what the sockets hold, so that the break comes in its middle.
TEST_F(TcpStreamTest, AReconnectionInTheMiddleOfAChunk) {
  constexpr uint32_t kBytes = 32 << 20;
  open(1, 2, kBytes, 4);
  auto worker = join(0, 1);
  BoxEndpoint& core = box_->endpoint(0);
  const std::vector<std::byte> gradient = noise(kBytes, 10);
  std::copy(gradient.begin(), gradient.end(), worker->gradients().begin());
  ASSERT_TRUE(worker->endpoint().post({0}, {0, 0, 100, 1}));
  ASSERT_TRUE(worker->endpoint().post({0}, {0, 0, kBytes, 2}));
  worker->endpoint().flush();
  ASSERT_EQ(poll(core, 1).size(), 1u);
  EXPECT_TRUE(poll(core, 0).empty());
  ASSERT_TRUE(core.post({.rank = 0}, {0, 0, kBytes, 3}));
  core.flush();
  EXPECT_TRUE(poll(worker->endpoint(), 0).empty());

  detach(0);
  const Offer offer = box_->reconnect(0);
  const auto broken = poll(worker->endpoint(), 2);
  ASSERT_EQ(broken.size(), 2u);
  EXPECT_FALSE(broken[0].ok || broken[1].ok);
  EXPECT_NE(broken[0].queue, broken[1].queue);
  EXPECT_FALSE(worker->connected());
  EXPECT_FALSE(worker->endpoint().post({0}, {0, 0, 1, 1}));
  attach(0, 1);
  EXPECT_FALSE(core.post({.rank = 0}, {0, 0, 1, 1})) << "attached, not connected";
  rig_->reconnect(*worker, offer);
  EXPECT_TRUE(worker->connected());
  EXPECT_TRUE(std::equal(gradient.begin(), gradient.end(), worker->gradients().begin()));

  // What was posted and not answered is sent again, both ways at once.
  const std::vector<std::byte> result = noise(kBytes, 11);
  std::copy(result.begin(), result.end(), box_->results().begin());
  poll(core, 0);
  ASSERT_TRUE(worker->endpoint().post({0}, {0, 0, kBytes, 2}));
  ASSERT_TRUE(core.post({.rank = 0}, {0, 0, kBytes, 3}));
  worker->endpoint().flush();
  core.flush();
  std::vector<Arrival> at_box, at_worker;
  for (int i = 0; i < 100000 && (at_box.empty() || at_worker.empty()); ++i) {
    std::array<Arrival, 4> some;
    at_box.insert(at_box.end(), some.begin(), some.begin() + core.poll(some));
    at_worker.insert(at_worker.end(), some.begin(), some.begin() + worker->endpoint().poll(some));
  }
  ASSERT_EQ(at_box.size(), 1u);
  ASSERT_EQ(at_worker.size(), 1u);
  EXPECT_TRUE(at_box[0].ok && at_box[0].imm == 2);
  EXPECT_TRUE(at_worker[0].ok && at_worker[0].imm == 3);
  EXPECT_TRUE(std::equal(gradient.begin(), gradient.end(), box_->slots(0).begin()));
  EXPECT_TRUE(std::equal(result.begin(), result.end(), worker->results().begin()));
  EXPECT_TRUE(poll(core, 0).empty());
}

// A worker that does not read costs the others nothing, and gets everything in the end.
TEST_F(TcpStreamTest, AWorkerThatDoesNotReadHoldsNobodyUp) {
  constexpr uint32_t kChunks = 64, kBytes = 1 << 20;
  open(2, 1, uint64_t{kChunks} * kBytes, kChunks);
  auto slow = join(0, 1);
  auto quick = join(1, 1);
  const std::vector<std::byte> results = noise(uint64_t{kChunks} * kBytes, 12);
  std::copy(results.begin(), results.end(), box_->results().begin());
  BoxEndpoint& core = box_->endpoint(0);
  poll(core, 0);
  std::array<uint32_t, 2> posted = {};
  const auto post = [&] {
    for (uint32_t rank = 0; rank < posted.size(); ++rank) {
      for (uint32_t& i = posted[rank]; i < kChunks; ++i) {
        const uint64_t at = uint64_t{i} * kBytes;
        if (!core.post({.rank = rank}, {at, at, kBytes, i})) break;
      }
    }
    core.flush();
  };
  const auto read_all = [&](WorkerLink& worker) {
    uint32_t seen = 0;
    for (int i = 0; i < 100000 && seen < kChunks; ++i) {
      post();
      std::array<Arrival, 8> some;
      core.poll(some);
      const size_t taken = worker.endpoint().poll(some);
      for (size_t j = 0; j < taken; ++j) EXPECT_EQ(some[j].imm, seen++);
    }
    EXPECT_EQ(seen, kChunks);
    EXPECT_TRUE(std::equal(results.begin(), results.end(), worker.results().begin()));
  };
  read_all(*quick);
  EXPECT_LT(counters(core).chunks_sent, 2 * kChunks);
  read_all(*slow);
  EXPECT_EQ(counters(core).chunks_sent, 2 * kChunks);
}

TEST_F(TcpStreamTest, ASleepingCoreIsWokenByTheConnectionAndAWorkerByItsEnd) {
  open(1, 1, 1000);
  const auto wakes = [](Endpoint& endpoint) {
    pollfd readable = {endpoint.wake_fd(), POLLIN, 0};
    return ::poll(&readable, 1, 0) == 1;
  };
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  BoxEndpoint& core = box_->endpoint(0);
  EXPECT_FALSE(core.post({.rank = 0}, {0, 0, 10, 1}));
  ASSERT_TRUE(core.arm({}));
  EXPECT_FALSE(wakes(core));
  auto worker = rig_->connect(offer, layout_);
  EXPECT_TRUE(wakes(core));
  core.disarm();
  poll(core, 0);
  EXPECT_TRUE(core.post({.rank = 0}, {0, 0, 10, 1}));
  core.flush();
  ASSERT_EQ(poll(worker->endpoint(), 1).size(), 1u);
  ASSERT_TRUE(worker->endpoint().arm({}));
  EXPECT_FALSE(wakes(worker->endpoint()));
  detach(0);
  EXPECT_FALSE(wakes(worker->endpoint()));
  box_->revoke(0);
  rig_->pump();
  EXPECT_TRUE(wakes(worker->endpoint()));
}

// It would sleep for ever where only its own posts can wake it.
TEST_F(TcpStreamTest, WhoFoundNoRoomDoesNotFallAsleepWhenThereIsSome) {
  constexpr uint32_t kBytes = 1 << 16;  // some of them fit into the socket
  open(1, 1, kBytes, 4);
  auto worker = join(0, 1);
  BoxEndpoint& core = box_->endpoint(0);
  poll(core, 0);
  while (core.post({.rank = 0}, {0, 0, kBytes, 1})) core.flush();
  while (!core.arm({})) poll(core, 0);
  core.disarm();
  EXPECT_FALSE(core.post({.rank = 0}, {0, 0, kBytes, 1}));
  EXPECT_GT(poll(worker->endpoint(), 0).size(), 0u);
  rig_->pump();
  EXPECT_FALSE(core.arm({}));
  EXPECT_TRUE(core.post({.rank = 0}, {0, 0, kBytes, 1}));
}

TEST_F(TcpStreamTest, SeveralQueuesOfACore) {
  layout_.queue_core = {0, 0, 2};
  layout_.queue_chunks = {4, 4, 4};
  layout_.max_ranks = 3;
  layout_.cores = 3;
  layout_.slots_bytes = layout_.results_bytes = 1000;
  box_ = rig_->transport().open_job(layout_);
  auto worker = join(2, 1);
  const auto arrives_at = [&](uint32_t queue, uint32_t core, uint32_t in_core) {
    ASSERT_TRUE(worker->endpoint().post({queue}, {0, 0, 10, queue}));
    worker->endpoint().flush();
    const auto arrivals = poll(box_->endpoint(core), 1);
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals[0].queue, in_core);
    EXPECT_EQ(arrivals[0].rank, 2u);
    EXPECT_EQ(arrivals[0].imm, queue);
    ASSERT_TRUE(box_->endpoint(core).post({in_core, 2}, {0, 0, 10, queue}));
    box_->endpoint(core).flush();
    EXPECT_EQ(poll(worker->endpoint(), 1).at(0).queue, queue);
  };
  arrives_at(0, 0, 0);
  arrives_at(1, 0, 1);
  arrives_at(2, 2, 0);
  EXPECT_TRUE(poll(box_->endpoint(1), 0).empty());
}

// Chunks of the usual size, as fast as one thread can: about one system call each way per chunk.
TEST_F(TcpStreamTest, SystemCallsPerChunk) {
  constexpr uint32_t kChunks = 256, kBytes = 32 << 10, kRanks = 4, kRounds = 4;
  open(kRanks, 1, uint64_t{kChunks} * kBytes, kChunks);
  std::vector<std::unique_ptr<WorkerLink>> workers;
  for (uint32_t rank = 0; rank < kRanks; ++rank) workers.push_back(join(rank, 1));
  BoxEndpoint& core = box_->endpoint(0);
  std::array<Arrival, 256> some;
  const auto post = [](Endpoint& endpoint, uint32_t rank, uint32_t& next, uint32_t end) {
    const uint32_t first = next;
    for (; next < end; ++next) {
      const uint64_t at = uint64_t{next} * kBytes;
      if (!endpoint.post({.rank = rank}, {at, at, kBytes, next})) break;
    }
    if (next > first) endpoint.flush();
  };
  for (uint32_t round = 0; round < kRounds; ++round) {
    std::array<uint32_t, kRanks> sent = {}, arrived = {}, answered = {};
    uint32_t left = 2 * kRanks * kChunks;
    for (int i = 0; i < 1'000'000 && left > 0; ++i) {
      const size_t taken = core.poll(some);
      for (size_t j = 0; j < taken; ++j) ++arrived[some[j].rank];
      left -= static_cast<uint32_t>(taken);
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        Endpoint& worker = workers[rank]->endpoint();
        post(core, rank, answered[rank], arrived[rank]);
        left -= static_cast<uint32_t>(worker.poll(some));
        post(worker, 0, sent[rank], kChunks);
      }
    }
    ASSERT_EQ(left, 0u);
  }
  const TcpCounters& box = counters(core);
  EXPECT_EQ(box.chunks_received, kRounds * kRanks * kChunks);
  EXPECT_EQ(box.chunks_sent, kRounds * kRanks * kChunks);
  const auto per = [](uint64_t calls, uint64_t chunks) {
    return static_cast<double>(calls) / static_cast<double>(chunks);
  };
  EXPECT_LT(per(box.receives + box.waits, box.chunks_received), 1.5);
  EXPECT_LT(per(box.sends, box.chunks_sent), 1.0);
  const EndpointCounters shown = core.counters();
  EXPECT_EQ(shown.sends, box.chunks_sent);
  EXPECT_EQ(shown.receives, box.chunks_received);
  EXPECT_EQ(shown.system_calls, box.receives + box.sends + box.waits);
  EXPECT_EQ(shown.polls + shown.empty_polls, box.receives + box.waits);
  RecordProperty("receives_per_chunk", std::to_string(per(box.receives, box.chunks_received)));
  RecordProperty("waits_per_chunk", std::to_string(per(box.waits, box.chunks_received)));
  RecordProperty("sends_per_chunk", std::to_string(per(box.sends, box.chunks_sent)));
}

}  // namespace tcp_stream_test
}  // namespace phub
