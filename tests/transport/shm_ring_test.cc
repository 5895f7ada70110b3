// Rings and doorbells: order, wrap-around, liars at the other end, no lost wake-up.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "tests/transport/link_test.h"
#include "tests/transport/shm_raw_worker.h"
#include "tests/transport/shm_rig.h"
#include "transport/error.h"
#include "transport/shm/ring.h"

namespace phub {
namespace shm_ring_test {

// A ring in private memory.
class LocalRing {
 public:
  explicit LocalRing(uint32_t entries)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(
                    kShmLine, (shm_ring_bytes(entries) + kShmLine - 1) / kShmLine * kShmLine)),
                std::free),
        entries_(entries) {
    std::memset(memory_.get(), 0, shm_ring_bytes(entries));
  }
  ShmRing* get() { return reinterpret_cast<ShmRing*>(memory_.get()); }
  ShmRing* operator->() { return get(); }
  ShmProducer producer(uint32_t first = 0) { return ShmProducer(get(), entries_, first); }
  ShmConsumer consumer(uint32_t first = 0) { return ShmConsumer(get(), entries_, first); }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  uint32_t entries_;
};

TEST(ShmRingTest, HoldsExactlyItsEntriesAcrossTheWrap) {
  for (const uint32_t first : {0u, 0xfffffff5u, 0x7ffffffbu}) {
    LocalRing ring(8);
    ring->tail = first;
    ring->head = first;
    ShmProducer producer = ring.producer(first);
    ShmConsumer consumer = ring.consumer(first);
    std::array<Arrival, 16> out;
    uint32_t next = 0, expected = 0;
    for (int round = 0; round < 100; ++round) {
      uint32_t pushed = 0;
      while (producer.push(next)) ++next, ++pushed;
      EXPECT_EQ(pushed, 8u);
      EXPECT_EQ(consumer.take({5, 6}, out), 0u) << "not published";
      producer.publish();
      ASSERT_EQ(consumer.take({5, 6}, std::span(out).first(3)), 3u);
      ASSERT_EQ(consumer.take({5, 6}, std::span(out).subspan(3)), 5u);
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(out[i].imm, expected++);
        EXPECT_EQ(out[i].queue, 5u);
        EXPECT_EQ(out[i].rank, 6u);
      }
    }
    EXPECT_FALSE(producer.broken() || consumer.broken());
  }
}

TEST(ShmRingTest, WakesOnceAtTheThresholdAcrossTheWrap) {
  for (const uint32_t first : {0u, 0xfffffffdu, 0x7ffffffeu}) {
    LocalRing ring(8);
    ring->tail = first;
    ring->head = first;
    ShmProducer producer = ring.producer(first);
    ShmConsumer consumer = ring.consumer(first);
    consumer.arm(4);
    EXPECT_FALSE(consumer.satisfied());
    for (int i = 0; i < 6; ++i) {
      ASSERT_TRUE(producer.push(i));
      EXPECT_EQ(producer.publish(), i == 3) << i;
    }
    consumer.arm(7);
    EXPECT_FALSE(consumer.satisfied());
    consumer.arm(6);
    EXPECT_TRUE(consumer.satisfied());
    consumer.arm(0);
    EXPECT_FALSE(consumer.satisfied());
    ASSERT_TRUE(producer.push(6));
    EXPECT_FALSE(producer.publish()) << "0: not for this ring";
    // More than the ring can hold would never come; a full ring is as much as there is.
    consumer.arm(100);
    ASSERT_TRUE(producer.push(7));
    EXPECT_TRUE(producer.publish());
  }
}

TEST(ShmRingTest, ATailThatLiesBreaksTheConsumer) {
  const auto broken_by = [](uint32_t taken, uint32_t tail_before, uint32_t tail) {
    LocalRing ring(8);
    ShmConsumer consumer = ring.consumer();
    std::array<Arrival, 8> out;
    ring->tail = tail_before;
    EXPECT_EQ(consumer.take({}, std::span(out).first(taken)), taken);
    EXPECT_FALSE(consumer.broken());
    ring->tail = tail;
    const size_t more = consumer.take({}, out);
    if (consumer.broken()) {
      EXPECT_EQ(more, 0u);
    }
    ring->tail = tail_before;  // repentance comes too late
    if (consumer.broken()) {
      EXPECT_EQ(consumer.take({}, out), 0u);
    }
    return consumer.broken();
  };
  EXPECT_FALSE(broken_by(4, 6, 6));
  EXPECT_FALSE(broken_by(4, 6, 12));
  EXPECT_TRUE(broken_by(4, 6, 13)) << "longer than the ring";
  EXPECT_TRUE(broken_by(4, 6, 5)) << "backwards, to what was not taken";
  EXPECT_TRUE(broken_by(4, 6, 3)) << "backwards, to what was taken";
  EXPECT_TRUE(broken_by(4, 6, 0x80000000u));
  EXPECT_TRUE(broken_by(0, 0, 0xffffffffu));
}

TEST(ShmRingTest, AHeadThatLiesBreaksTheProducer) {
  const auto broken_by = [](uint32_t head) {
    LocalRing ring(8);
    ShmProducer producer = ring.producer();
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(producer.push(i));
    producer.publish();
    ring->head = 3;
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(producer.push(i));
    ring->head = head;
    const bool pushed = producer.push(0);
    if (producer.broken()) {
      EXPECT_FALSE(pushed);
    }
    ring->head = 11;
    if (producer.broken()) {
      EXPECT_FALSE(producer.push(0));
    }
    return producer.broken();
  };
  EXPECT_FALSE(broken_by(3));
  EXPECT_FALSE(broken_by(11));
  EXPECT_TRUE(broken_by(2)) << "backwards";
  EXPECT_TRUE(broken_by(12)) << "beyond what was pushed";
  EXPECT_TRUE(broken_by(0xffffffffu));
}

TEST(ShmRingTest, AnyWakeAtCostsAtMostOneWakeUpPerPublish) {
  LocalRing ring(8);
  ShmProducer producer = ring.producer();
  ShmConsumer consumer = ring.consumer();
  std::mt19937_64 random(7);
  std::array<Arrival, 8> out;
  for (int i = 0; i < 10000; ++i) {
    ring->wake_at = i % 3 == 0 ? ~uint64_t{0} : random();
    ASSERT_TRUE(producer.push(i));
    producer.publish();
    EXPECT_FALSE(producer.publish()) << "nothing new to show";
    ASSERT_EQ(consumer.take({}, out), 1u);
    ASSERT_EQ(out[0].imm, static_cast<uint32_t>(i));
  }
}

TEST(ShmRingTest, TwoThreadsSeeEverythingInOrder) {
  constexpr uint32_t kCount = 2'000'000;
  LocalRing ring(256);
  std::vector<uint32_t> payload(kCount);  // written before its immediate is published
  std::thread writer([&] {
    ShmProducer producer = ring.producer();
    for (uint32_t i = 0; i < kCount; ++i) {
      payload[i] = i * 3;
      while (!producer.push(i)) {
        producer.publish();
        std::this_thread::yield();
      }
      if (i % 7 == 0) producer.publish();
    }
    producer.publish();
  });
  ShmConsumer consumer = ring.consumer();
  std::array<Arrival, 64> out;
  uint32_t expected = 0, wrong = 0;
  while (expected < kCount && !consumer.broken()) {
    const size_t taken = consumer.take({}, out);
    if (taken == 0) std::this_thread::yield();
    for (size_t i = 0; i < taken; ++i, ++expected) {
      wrong += out[i].imm != expected || payload[expected] != expected * 3;
    }
  }
  writer.join();
  EXPECT_EQ(expected, kCount);
  EXPECT_EQ(wrong, 0u);
}

class ShmLinkTest : public LinkTest {
 protected:
  ShmLinkTest() { rig_ = std::make_unique<ShmRig>(); }
};

// Over a real link: box, one rank that lies, one that does not.
class ShmLiarTest : public ShmLinkTest {
 protected:
  void SetUp() override {
    open(2, 1);
    liar_ = std::make_unique<RawWorker>(box_->admit(0, 1));
    attach(0, 1);
    handle(2);
    ASSERT_TRUE(liar_->receive());
    honest_ = join(1, 1);
  }
  // The broken queue pair says so once; the other rank's work goes on.
  void expect_broken_once() {
    std::array<Arrival, 8> out;
    int broken = 0, honest = 0;
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(honest_->endpoint().post({0}, {0, 0, 256, 42}));
      honest_->endpoint().flush();
      const size_t taken = box_->endpoint(0).poll(out);
      for (size_t k = 0; k < taken; ++k) {
        if (out[k].rank == 0) {
          EXPECT_FALSE(out[k].ok);
        }
        broken += out[k].rank == 0;
        honest += out[k].rank == 1 && out[k].ok && out[k].imm == 42;
      }
    }
    EXPECT_EQ(broken, 1);
    EXPECT_EQ(honest, 10);
    EXPECT_FALSE(box_->endpoint(0).post({.rank = 0}, {}));
    EXPECT_TRUE(box_->endpoint(0).arm({}));
    box_->endpoint(0).disarm();
  }

  std::unique_ptr<RawWorker> liar_;
  std::unique_ptr<WorkerLink> honest_;
};

TEST_F(ShmLiarTest, TailFarAhead) {
  liar_->to_box(0).tail = 1000;
  EXPECT_FALSE(box_->endpoint(0).arm({})) << "a broken queue pair is something to poll";
  expect_broken_once();
}

TEST_F(ShmLiarTest, TailBackwards) {
  liar_->to_box(0).tail = 2;
  std::array<Arrival, 8> out;
  EXPECT_EQ(box_->endpoint(0).poll(out), 2u);
  liar_->to_box(0).tail = 1;
  expect_broken_once();
}

TEST_F(ShmLiarTest, HeadBeyondTheTail) {
  BoxEndpoint& core = box_->endpoint(0);
  liar_->to_worker(0).head = 77;
  int posted = 0;
  while (core.post({.rank = 0}, {})) ++posted;
  EXPECT_EQ(posted, 32) << "shm_ring_entries(8)";
  core.flush();
  expect_broken_once();
}

// A full pipe that the worker has made blocking: the core must never wait in it.
TEST_F(ShmLiarTest, AWorkerThatNeverReadsItsWakeUpsBlocksNobody) {
  ASSERT_EQ(fcntl(liar_->wake().get(), F_SETFL, 0), 0);
  BoxEndpoint& core = box_->endpoint(0);
  for (uint32_t i = 0; i < 20000; ++i) {
    ShmRing& ring = liar_->to_worker(0);
    ring.head = i;
    ring.wake_at = kShmArmed | (i + 1);
    ASSERT_TRUE(core.post({.rank = 0}, {}));
    core.flush();
  }
  EXPECT_EQ(core.counters().wakeups, 20000u);
}

class ShmWakeTest : public ShmLinkTest {
 protected:
  void hammer(uint32_t rounds, uint32_t burst, uint64_t seed);
};

// Round trips in which both sides sleep every time, with thresholds: a lost wake-up is a time-out.
void ShmWakeTest::hammer(uint32_t rounds, uint32_t burst, uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  open(1, 1, 64, 64);
  const auto worker = join(0, 1);
  std::atomic<bool> lost = false;

  const auto side = [&](Endpoint& endpoint, bool first, uint64_t own_seed) {
    std::mt19937_64 random(own_seed);
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;
    epoll_ctl(epoll, EPOLL_CTL_ADD, endpoint.wake_fd(), &event);
    const auto send = [&] {
      for (uint32_t i = 0; i < burst; ++i) {
        for (uint64_t spin = random() % 64; spin > 0; --spin)
          std::atomic_signal_fence(std::memory_order_seq_cst);
        if (!endpoint.post({.queue = 0}, {0, 0, 0, i})) lost = true;
        if (random() % 2 == 0) endpoint.flush();
      }
      endpoint.flush();
    };
    if (first) send();
    std::array<Arrival, 64> out;
    for (uint32_t round = 0; round < rounds && !lost; ++round) {
      for (uint32_t seen = 0; seen < burst && !lost;) {
        const std::array<uint32_t, 1> wanted = {1 +
                                                static_cast<uint32_t>(random() % (burst - seen))};
        if (endpoint.arm(wanted)) {
          if (epoll_wait(epoll, &event, 1, 10000) == 0) lost = true;
          endpoint.disarm();
        }
        seen += endpoint.poll(out);
      }
      if (!first || round + 1 < rounds) send();
    }
    close(epoll);
  };
  std::thread other([&] { side(worker->endpoint(), true, seed + 1); });
  side(box_->endpoint(0), false, seed);
  other.join();
  EXPECT_FALSE(lost);
}

TEST_F(ShmWakeTest, NoWakeUpIsLostInPingPong) { hammer(100000, 1, std::random_device{}()); }
TEST_F(ShmWakeTest, NoWakeUpIsLostInBursts) { hammer(20000, 12, std::random_device{}()); }

// A worker that waits for a whole queue is woken once for it, not once per flush.
TEST_F(ShmWakeTest, AThresholdIsOneWakeUp) {
  open(1, 2, 64, 1600);
  const auto worker = join(0, 1);
  const std::array<uint32_t, 2> all = {1600, 0};
  ASSERT_TRUE(worker->endpoint().arm(all));
  for (uint32_t i = 0; i < 1600; ++i) {
    for (const uint32_t core : {0u, 1u}) {
      ASSERT_TRUE(box_->endpoint(core).post({.rank = 0}, {0, 0, 0, i}));
      box_->endpoint(core).flush();
    }
    ASSERT_EQ(box_->endpoint(0).counters().wakeups, i == 1599 ? 1u : 0u);
  }
  EXPECT_EQ(box_->endpoint(1).counters().wakeups, 0u) << "not asked for";
}

}  // namespace shm_ring_test
}  // namespace phub
