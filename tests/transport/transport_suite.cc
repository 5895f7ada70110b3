#include "tests/transport/transport_suite.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

using Clock = std::chrono::steady_clock;

// Bytes that say who wrote what, when.
std::vector<std::byte> pattern(uint32_t who, uint32_t queue, uint32_t chunk, uint32_t round,
                               size_t bytes) {
  uint64_t state =
      (uint64_t{who} << 48) ^ (uint64_t{queue} << 40) ^ (uint64_t{chunk} << 16) ^ round;
  std::vector<std::byte> result(bytes);
  for (std::byte& byte : result) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return result;
}

bool equal(std::span<const std::byte> memory, const std::vector<std::byte>& expected) {
  return std::equal(expected.begin(), expected.end(), memory.begin());
}

constexpr uint32_t kBox = 0xffff;  // `who` of a result

}  // namespace

void TransportSuite::TearDown() {
  if (box_ != nullptr) {
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
      if (workers_[rank] != nullptr) drop(rank);
    }
  }
  box_.reset();
}

void TransportSuite::open(uint32_t ranks, std::vector<uint32_t> queue_chunks) {
  layout_.max_ranks = ranks;
  layout_.cores = static_cast<uint32_t>(queue_chunks.size());
  const uint64_t chunks = std::accumulate(queue_chunks.begin(), queue_chunks.end(), uint64_t{0});
  layout_.queue_chunks = std::move(queue_chunks);
  layout_.slots_bytes = layout_.results_bytes = chunks * kChunkBytes;
  layout_.core_node.assign(layout_.cores, 0);
  box_ = rig_->transport().open_job(layout_);
  workers_.resize(ranks);
}

void TransportSuite::join(uint32_t rank, uint32_t incarnation) {
  const Offer offer = box_->admit(rank, incarnation);
  for (uint32_t core = 0; core < cores(); ++core) box_->endpoint(core).attach(rank, incarnation);
  workers_[rank] = rig_->connect(offer, layout_);
  pump();
  for (uint32_t core = 0; core < cores(); ++core) box_->endpoint(core).poll({});  // it is open now
}

void TransportSuite::drop(uint32_t rank) {
  for (uint32_t core = 0; core < cores(); ++core) box_->endpoint(core).detach(rank);
  box_->revoke(rank);
  workers_[rank].reset();
}

uint64_t TransportSuite::offset_of(uint32_t queue, uint32_t chunk) const {
  const auto begin = layout_.queue_chunks.begin();
  return (std::accumulate(begin, begin + queue, uint64_t{0}) + chunk) * kChunkBytes;
}

Write TransportSuite::write_of(uint32_t queue, uint32_t chunk, uint32_t round) const {
  const uint64_t offset = offset_of(queue, chunk);
  return {offset, offset, kChunkBytes, encode({chunk, round, ImmKind::kData})};
}

void TransportSuite::pump() {
  rig_->pump();
  const auto drive = [this](Endpoint& endpoint) {
    if (&endpoint != asleep_) rig_->drive(endpoint);
  };
  for (uint32_t core = 0; box_ != nullptr && core < cores(); ++core) drive(box_->endpoint(core));
  for (const auto& worker : workers_) {
    if (worker != nullptr) drive(worker->endpoint());
  }
  for (Endpoint* other : others_) drive(*other);
}

void TransportSuite::post_surely(Endpoint& endpoint, QueuePair to, const Write& write) {
  ASSERT_TRUE(eventually([&] {
    if (endpoint.post(to, write)) return true;
    endpoint.flush();
    return false;
  }));
}

std::vector<Arrival> TransportSuite::poll_for(Endpoint& endpoint, size_t count) {
  std::vector<Arrival> arrivals;
  eventually([&] {
    std::array<Arrival, 64> some;
    const size_t taken = endpoint.poll(std::span(some).first(std::min(some.size(), count)));
    arrivals.insert(arrivals.end(), some.begin(), some.begin() + taken);
    return arrivals.size() >= count;
  });
  return arrivals;
}

bool TransportSuite::eventually(const std::function<bool()>& condition) {
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  for (;;) {
    if (condition()) return true;
    pump();
    rig_->transport().handle_events(rig_->events());
    if (Clock::now() > deadline) return condition();
  }
}

// Whose arrivals have come: each once, in any order.
class Seen {
 public:
  bool is_new(uint32_t from, uint32_t chunk) { return seen_.emplace(from, chunk).second; }
  size_t size() const { return seen_.size(); }

 private:
  std::set<std::pair<uint32_t, uint32_t>> seen_;
};

// A training in small: everyone pushes every chunk, the box answers each complete chunk.
TEST_P(TransportSuite, EveryChunkArrivesOnceWithItsPayload) {
  constexpr uint32_t kRanks = 3, kRounds = 12;
  open(kRanks, {37, 50});
  for (uint32_t rank = 0; rank < kRanks; ++rank) join(rank, 1);

  for (uint32_t round = 1; round <= kRounds; ++round) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      WorkerLink& worker = *workers_[rank];
      for (uint32_t queue = 0; queue < cores(); ++queue) {
        for (uint32_t chunk = 0; chunk < layout_.queue_chunks[queue]; ++chunk) {
          const auto payload = pattern(rank, queue, chunk, round, kChunkBytes);
          std::memcpy(worker.gradients().data() + offset_of(queue, chunk), payload.data(),
                      payload.size());
          post_surely(worker.endpoint(), {queue}, write_of(queue, chunk, round));
        }
      }
      worker.endpoint().flush();
    }
    for (uint32_t core = 0; core < cores(); ++core) {
      BoxEndpoint& endpoint = box_->endpoint(core);
      const uint32_t chunks = layout_.queue_chunks[core];
      Seen seen;
      for (const Arrival& arrival : poll_for(endpoint, chunks * kRanks)) {
        ASSERT_TRUE(arrival.ok);
        ASSERT_EQ(arrival.queue, 0u);
        ASSERT_LT(arrival.rank, kRanks);
        const Imm imm = decode(arrival.imm);
        ASSERT_EQ(imm, (Imm{imm.chunk, round & 0xffu, ImmKind::kData}));
        ASSERT_LT(imm.chunk, chunks);
        ASSERT_TRUE(seen.is_new(arrival.rank, imm.chunk)) << "rank " << arrival.rank;
        ASSERT_TRUE(equal(box_->slots(arrival.rank).subspan(offset_of(core, imm.chunk)),
                          pattern(arrival.rank, core, imm.chunk, round, kChunkBytes)));
      }
      ASSERT_EQ(seen.size(), kRanks * chunks);
      std::array<Arrival, 4> more;
      pump();
      ASSERT_EQ(endpoint.poll(more), 0u);

      for (uint32_t i = chunks; i-- > 0;) {  // any order; each worker sees the same
        const auto payload = pattern(kBox, core, i, round, kChunkBytes);
        std::memcpy(box_->results().data() + offset_of(core, i), payload.data(), payload.size());
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
          post_surely(endpoint, {.rank = rank}, write_of(core, i, round));
        }
      }
      endpoint.flush();
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<uint32_t>& chunks = layout_.queue_chunks;
      const uint32_t all = std::accumulate(chunks.begin(), chunks.end(), 0u);
      Seen seen;
      for (const Arrival& arrival : poll_for(workers_[rank]->endpoint(), all)) {
        ASSERT_TRUE(arrival.ok);
        ASSERT_EQ(arrival.rank, 0u);
        ASSERT_LT(arrival.queue, cores());
        const Imm imm = decode(arrival.imm);
        ASSERT_EQ(imm, (Imm{imm.chunk, round & 0xffu, ImmKind::kData}));
        ASSERT_LT(imm.chunk, chunks[arrival.queue]);
        ASSERT_TRUE(seen.is_new(arrival.queue, imm.chunk)) << "rank " << rank;
        ASSERT_TRUE(equal(workers_[rank]->results().subspan(offset_of(arrival.queue, imm.chunk)),
                          pattern(kBox, arrival.queue, imm.chunk, round, kChunkBytes)));
      }
      ASSERT_EQ(seen.size(), all);
    }
  }
}

TEST_P(TransportSuite, APostThatFindsNoRoomIsTriedAgain) {
  open(1, {8});
  join(0, 1);
  // More than any queue holds, both ways. Nothing may be lost or repeated.
  constexpr uint32_t kWrites = 5000;
  const auto flood = [&](Endpoint& from, Endpoint& to) {
    uint32_t posted = 0, refused = 0;
    Seen seen;
    ASSERT_TRUE(eventually([&] {
      while (posted < kWrites && from.post({}, {0, 0, 0, posted})) ++posted;
      if (posted < kWrites) ++refused;
      from.flush();
      std::array<Arrival, 100> some;
      const size_t taken = to.poll(some);
      for (size_t i = 0; i < taken; ++i) {
        EXPECT_TRUE(some[i].ok);
        EXPECT_LT(some[i].imm, posted);
        EXPECT_TRUE(seen.is_new(0, some[i].imm));
      }
      return seen.size() == kWrites || HasFailure();
    }));
    EXPECT_EQ(seen.size(), kWrites);
    EXPECT_GT(refused, 0u);
  };
  flood(workers_[0]->endpoint(), box_->endpoint(0));
  flood(box_->endpoint(0), workers_[0]->endpoint());
}

TEST_P(TransportSuite, NothingArrivesBeforeTheFlush) {
  open(1, {8});
  join(0, 1);
  Endpoint& worker = workers_[0]->endpoint();
  ASSERT_TRUE(worker.post({0}, write_of(0, 3, 1)));
  pump();
  std::array<Arrival, 4> some;
  EXPECT_EQ(box_->endpoint(0).poll(some), 0u);
  worker.flush();
  EXPECT_EQ(poll_for(box_->endpoint(0), 1).size(), 1u);
}

// No rank waits for a noisier one.
TEST_P(TransportSuite, PollingIsFair) {
  if (rig_->is_fifo()) GTEST_SKIP() << "the NIC's order of arrival is kept";
  open(3, {2000});
  for (uint32_t rank = 0; rank < 3; ++rank) join(rank, 1);
  uint32_t posted = 0;
  while (posted < 1500 && workers_[1]->endpoint().post({0}, write_of(0, posted, 1))) ++posted;
  ASSERT_GE(posted, 48u) << "as many as are polled below";
  workers_[1]->endpoint().flush();
  for (const uint32_t rank : {0u, 2u}) {
    ASSERT_TRUE(workers_[rank]->endpoint().post({0}, write_of(0, 7, 1)));
    workers_[rank]->endpoint().flush();
  }
  for (int i = 0; i < 100; ++i) pump();
  std::array<Arrival, 48> some;
  const size_t taken = box_->endpoint(0).poll(some);
  const auto quiet = [](const Arrival& arrival) { return arrival.rank != 1; };
  EXPECT_EQ(std::count_if(some.begin(), some.begin() + taken, quiet), 2);
}

// Sleeping until a number of arrivals is there. A transport may wake earlier, never too late.
TEST_P(TransportSuite, ASleeperIsWokenAtItsThreshold) {
  open(2, {40, 40});
  for (uint32_t rank = 0; rank < 2; ++rank) join(rank, 1);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  const auto woken = [&](Endpoint& endpoint) {
    if (endpoint.wake_fd() < 0) return true;
    epoll_event event = {};
    return epoll_wait(epoll, &event, 1, 0) == 1;
  };
  const auto watch = [&](Endpoint& endpoint) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;
    if (endpoint.wake_fd() >= 0) {
      ASSERT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, endpoint.wake_fd(), &event), 0);
    }
  };
  const auto check = [&](Endpoint& sleeper, uint32_t sleepers, Endpoint& peer, QueuePair to) {
    watch(sleeper);
    for (uint32_t round = 1; round <= 20; ++round) {
      const uint32_t wanted = 1 + round % 30;
      woken(sleeper);  // what an earlier round left over
      std::vector<uint32_t> wake_after(2, 0);
      wake_after[sleepers] = wanted;
      ASSERT_TRUE(sleeper.arm(wake_after));
      asleep_ = &sleeper;
      for (uint32_t i = 0; i < wanted; ++i) {
        post_surely(peer, to, write_of(0, i, round));
        if (i % 3 == 0) peer.flush();
      }
      peer.flush();
      ASSERT_TRUE(eventually([&] { return woken(sleeper); })) << "wanted " << wanted;
      asleep_ = nullptr;
      sleeper.disarm();
      ASSERT_EQ(poll_for(sleeper, wanted).size(), wanted);
    }
  };
  check(workers_[1]->endpoint(), 0, box_->endpoint(0), {.rank = 1});
  check(box_->endpoint(0), 0, workers_[0]->endpoint(), {.queue = 0});
  close(epoll);
}

TEST_P(TransportSuite, ArmSaysWhenThereIsWorkAlready) {
  open(1, {8});
  join(0, 1);
  Endpoint& worker = workers_[0]->endpoint();
  for (uint32_t chunk = 0; chunk < 3; ++chunk) post_surely(worker, {0}, write_of(0, chunk, 1));
  worker.flush();
  ASSERT_TRUE(eventually([&] {
    if (!box_->endpoint(0).arm({})) return true;
    box_->endpoint(0).disarm();
    return false;
  }));
  EXPECT_EQ(poll_for(box_->endpoint(0), 3).size(), 3u);
  EXPECT_TRUE(box_->endpoint(0).arm({}));
  box_->endpoint(0).disarm();
}

TEST_P(TransportSuite, SixtyFourRanks) {
  constexpr uint32_t kRanks = 64;
  open(kRanks, {16, 17});
  for (uint32_t rank = 0; rank < kRanks; ++rank) join(rank, 1);
  for (uint32_t round = 1; round <= 3; ++round) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (uint32_t queue = 0; queue < cores(); ++queue) {
        for (uint32_t chunk = 0; chunk < layout_.queue_chunks[queue]; ++chunk) {
          post_surely(workers_[rank]->endpoint(), {queue}, write_of(queue, chunk, round));
        }
      }
      workers_[rank]->endpoint().flush();
    }
    for (uint32_t core = 0; core < cores(); ++core) {
      const uint32_t chunks = layout_.queue_chunks[core];
      Seen seen;
      for (const Arrival& arrival : poll_for(box_->endpoint(core), kRanks * chunks)) {
        ASSERT_LT(decode(arrival.imm).chunk, chunks);
        ASSERT_TRUE(seen.is_new(arrival.rank, decode(arrival.imm).chunk));
      }
      ASSERT_EQ(seen.size(), kRanks * chunks);
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        post_surely(box_->endpoint(core), {.rank = rank}, write_of(core, rank % chunks, round));
      }
      box_->endpoint(core).flush();
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (const Arrival& arrival : poll_for(workers_[rank]->endpoint(), 2)) {
        ASSERT_EQ(decode(arrival.imm).chunk, rank % layout_.queue_chunks[arrival.queue]);
      }
    }
  }
}

}  // namespace phub
