// Budgets of NICs around links that are not there: what goes through them when, in a time of the
// test's. Every window of time is looked at, with the headers that are counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "transport/error.h"
#include "transport/paced/transport.h"

namespace phub {
namespace paced_test {

constexpr uint64_t kRate = 10'000'000;
constexpr uint64_t kMs = 1'000'000;
constexpr uint32_t kChunkBytes = 4096;

struct Went {
  uint64_t ns = 0, bytes = 0;
};
using Log = std::vector<Went>;

uint64_t most_beyond(Log log, uint64_t rate) {
  std::ranges::stable_sort(log, {}, &Went::ns);
  long double most = 0;
  for (size_t first = 0; first < log.size(); ++first) {
    uint64_t bytes = 0;
    for (size_t last = first; last < log.size(); ++last) {
      bytes += log[last].bytes;
      const auto ns = static_cast<long double>(log[last].ns - log[first].ns);
      most = std::max(most, bytes - static_cast<long double>(rate) * ns / 1e9L);
    }
  }
  return static_cast<uint64_t>(most);
}

// An endpoint that takes everything, or nothing, and remembers when.
class Taker : public virtual BoxEndpoint {
 public:
  explicit Taker(const uint64_t& now) : now_(now) {}
  bool full = false;
  bool over_memory = false;
  std::vector<Log> by_queue{4};

  size_t poll(std::span<Arrival> /*out*/) override { return 0; }
  bool post(QueuePair to, const Write& write) override {
    if (!full) by_queue[to.queue].push_back({now_, wire_bytes(write.bytes)});
    return !full;
  }
  void flush() override {}
  bool arm(std::span<const uint32_t> /*wake_after*/) override { return true; }
  void disarm() override {}
  int wake_fd() const override { return -1; }
  bool crosses_nic(QueuePair /*to*/) const override { return !over_memory; }
  void attach(uint32_t /*rank*/, uint32_t /*incarnation*/) override {}
  void detach(uint32_t /*rank*/) override {}

 private:
  const uint64_t& now_;
};

class TakerBox final : public BoxLink {
 public:
  TakerBox(const uint64_t& now, uint32_t cores) {
    for (uint32_t core = 0; core < cores; ++core) takers.push_back(std::make_unique<Taker>(now));
  }
  std::vector<std::unique_ptr<Taker>> takers;

  std::span<std::byte> results() override { return {}; }
  BoxEndpoint& endpoint(uint32_t core) override { return *takers[core]; }
  Offer admit(uint32_t /*rank*/, uint32_t /*incarnation*/) override { return {}; }
  void use_ticket(std::string /*ticket*/) override {}
  std::span<const std::byte> slots(uint32_t /*rank*/) override { return {}; }
  HeldMemory revoke(uint32_t /*rank*/) override { return nullptr; }
  bool slots_belong_to_worker() const override { return false; }
};

class TakerTransport final : public Transport {
 public:
  TakerTransport(const uint64_t& now, std::vector<std::string> nics, std::vector<TakerBox*>& boxes)
      : now_(now), nics_(std::move(nics)), boxes_(boxes) {}
  std::string_view name() const override { return "taker"; }
  std::string describe() const override { return "taker"; }
  std::vector<NicPort> ports() const override {
    std::vector<NicPort> ports;
    for (const std::string& nic : nics_) ports.push_back({nic, NicPort::kEveryNode});
    return ports;
  }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    auto box = std::make_unique<TakerBox>(now_, layout.cores);
    boxes_.push_back(box.get());
    return box;
  }
  int event_fd() const override { return -1; }
  void handle_events(std::vector<TransportEvent>& out) override {
    out.push_back({TransportEvent::kDisconnected, boxes_.back(), 3, 1});
  }

 private:
  const uint64_t& now_;
  const std::vector<std::string> nics_;
  std::vector<TakerBox*>& boxes_;
};

Log all_of(std::initializer_list<Log> logs) {
  Log all;
  for (const Log& log : logs) all.insert(all.end(), log.begin(), log.end());
  return all;
}
uint64_t bytes_of(const Log& log) {
  uint64_t bytes = 0;
  for (const Went& went : log) bytes += went.bytes;
  return bytes;
}
// Of the budget, the part that was used in so much time.
double part(const Log& log, uint64_t ns) {
  return (static_cast<double>(bytes_of(log)) - static_cast<double>(burst_of(kRate))) /
         (static_cast<double>(ns) * 1e-9 * kRate);
}

// Endpoints that always have something to send.
class PacedTest : public ::testing::Test {
 protected:
  struct Sender {
    Endpoint* endpoint;
    uint32_t queue;
  };
  void send_for(uint64_t ns, const std::vector<Sender>& senders) {
    for (const uint64_t end = now_ + ns; now_ < end; now_ += kMs / 4) {
      for (const auto& [endpoint, queue] : senders) {
        while (endpoint->post({queue, 0}, {.bytes = kChunkBytes})) {
        }
      }
    }
  }
  uint64_t now_ = 5;
};

class PacedBox : public PacedTest {
 protected:
  void open(std::vector<std::string> nics) {
    transport_ = make_paced(std::make_unique<TakerTransport>(now_, std::move(nics), boxes_),
                            {.bytes_per_s = kRate, .clock = [this] { return now_; }});
  }
  std::unique_ptr<BoxLink> job(std::vector<uint32_t> queue_chunks, std::vector<uint32_t> queue_core,
                               std::vector<std::string> queue_nic, std::vector<uint32_t> cpus) {
    LinkLayout layout;
    layout.max_ranks = 1;
    layout.cores = static_cast<uint32_t>(cpus.size());
    layout.queue_chunks = std::move(queue_chunks);
    layout.queue_core = std::move(queue_core);
    layout.queue_nic = std::move(queue_nic);
    layout.core_cpu = std::move(cpus);
    return transport_->open_job(layout);
  }
  std::vector<TakerBox*> boxes_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(PacedBox, ANicKeepsToItsBudgetWhicheverCoresSend) {
  open({"a", "b"});
  const auto link = job({30, 10, 40}, {0, 1, 1}, {"a", "a", "b"}, {4, 5});
  send_for(500 * kMs, {{&link->endpoint(0), 0}, {&link->endpoint(1), 0}, {&link->endpoint(1), 1}});
  const std::vector<Log>& first = boxes_[0]->takers[0]->by_queue;
  const std::vector<Log>& second = boxes_[0]->takers[1]->by_queue;
  EXPECT_LE(most_beyond(all_of({first[0], second[0]}), kRate), 2 * burst_of(kRate));
  EXPECT_LE(most_beyond(second[1], kRate), burst_of(kRate));
  // Each has its part, and uses it.
  EXPECT_NEAR(part(first[0], 500 * kMs), 0.75, 0.02);
  EXPECT_NEAR(part(second[0], 500 * kMs), 0.25, 0.02);
  EXPECT_NEAR(part(second[1], 500 * kMs), 1, 0.02);
}

TEST_F(PacedBox, JobsOnOneCoreShareItsPart) {
  open({"a"});
  const auto one = job({10}, {0}, {"a"}, {4});
  const auto two = job({10}, {0}, {"a"}, {4});
  send_for(300 * kMs, {{&one->endpoint(0), 0}, {&two->endpoint(0), 0}});
  const Log all = all_of({boxes_[0]->takers[0]->by_queue[0], boxes_[1]->takers[0]->by_queue[0]});
  EXPECT_LE(most_beyond(all, kRate), burst_of(kRate));
}

TEST_F(PacedBox, PartsFollowTheJobsThatAreThere) {
  open({"a"});
  const auto one = job({10}, {0}, {"a"}, {4});
  auto two = job({30}, {0}, {"a"}, {5});
  const Log& log = boxes_[0]->takers[0]->by_queue[0];
  send_for(300 * kMs, {{&one->endpoint(0), 0}});
  const uint64_t quarter = bytes_of(log);
  EXPECT_NEAR(static_cast<double>(quarter - burst_of(kRate / 4)) / (0.3 * kRate), 0.25, 0.03);
  two.reset();
  send_for(300 * kMs, {{&one->endpoint(0), 0}});
  EXPECT_NEAR(static_cast<double>(bytes_of(log) - quarter) / (0.3 * kRate), 1, 0.03);
}

// A transport over one address names no NIC, and a plan calls it by the nodes then.
TEST_F(PacedBox, WithoutNamesThereIsOneNic) {
  open({});
  const auto link = job({10, 10}, {0, 1}, {"mem0", "mem1"}, {4, 5});
  send_for(300 * kMs, {{&link->endpoint(0), 0}, {&link->endpoint(1), 0}});
  uint64_t bytes = 0;
  for (const auto& taker : boxes_[0]->takers) bytes += bytes_of(taker->by_queue[0]);
  EXPECT_LE(static_cast<double>(bytes), 0.3 * kRate + 2.0 * static_cast<double>(burst_of(kRate)));
}

// A worker on the box's own host maps its memory.
TEST_F(PacedBox, WhatCrossesNoNicHasNoBudget) {
  open({"a"});
  const auto link = job({10}, {0}, {"a"}, {4});
  Taker& taker = *boxes_[0]->takers[0];
  taker.over_memory = true;
  const Write write{.bytes = kChunkBytes};
  for (uint64_t bytes = 0; bytes < 4 * burst_of(kRate); bytes += kChunkBytes) {
    ASSERT_TRUE(link->endpoint(0).post({0, 0}, write));
  }
  taker.over_memory = false;  // nor did it take anything of it
  EXPECT_TRUE(link->endpoint(0).post({0, 0}, write));
}

TEST_F(PacedBox, SaysWhenToTryAgain) {
  open({"a"});
  const auto link = job({10}, {0}, {"a"}, {4});
  BoxEndpoint& endpoint = link->endpoint(0);
  while (endpoint.post({0, 0}, {.bytes = kChunkBytes})) {
  }
  const uint64_t wait = endpoint.refused_for_ns();
  ASSERT_GT(wait, 1u);
  now_ += wait - 1;
  EXPECT_FALSE(endpoint.post({0, 0}, {.bytes = kChunkBytes}));
  now_ += 1;
  EXPECT_TRUE(endpoint.post({0, 0}, {.bytes = kChunkBytes}));
  // A queue without room says nothing of that kind, and takes no tokens.
  now_ += 10 * kMs;
  boxes_[0]->takers[0]->full = true;
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(endpoint.post({0, 0}, {.bytes = kChunkBytes}));
  EXPECT_EQ(endpoint.refused_for_ns(), 0u);
  boxes_[0]->takers[0]->full = false;
  EXPECT_TRUE(endpoint.post({0, 0}, {.bytes = kChunkBytes}));
}

TEST_F(PacedBox, EventsAreOfTheLinkThatTheServerHas) {
  open({"a"});
  const auto link = job({10}, {0}, {"a"}, {4});
  std::vector<TransportEvent> events;
  transport_->handle_events(events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].link, link.get());
  EXPECT_EQ(events[0].rank, 3u);
}

// A worker's link whose queues go over these NICs.
class TakerLink final : public WorkerLink {
 public:
  TakerLink(const uint64_t& now, std::vector<std::string> nics, bool shared = false)
      : taker(now), other(now), nics(std::move(nics)), shared_(shared) {}
  Taker taker, other;  // of the first thread, and of a second one
  std::vector<std::string> nics;

  std::span<std::byte> gradients() override { return {}; }
  std::span<const std::byte> results() override { return {}; }
  Endpoint& endpoint() override { return taker; }
  Endpoint& endpoint_of(uint32_t thread) override { return thread == 0 ? taker : other; }
  bool connected() override { return true; }
  bool zero_copy() const override { return shared_; }
  std::string nic_of(uint32_t queue) const override { return nics[queue]; }
  void reconnect(const Offer& /*offer*/) override { std::ranges::reverse(nics); }

 private:
  const bool shared_;
};

TEST_F(PacedTest, EachNicOfAWorkerHasABudget) {
  auto taken = std::make_unique<TakerLink>(now_, std::vector<std::string>{"a", "b", "a"});
  const std::vector<Log>& by_queue = taken->taker.by_queue;
  const auto link =
      make_paced(std::move(taken), 3, {.bytes_per_s = kRate, .clock = [this] { return now_; }});
  EXPECT_TRUE(link->needs_polling());
  const auto send = [&](uint64_t ns) {
    for (const uint64_t end = now_ + ns; now_ < end; now_ += kMs / 4) {
      for (uint32_t queue = 0; queue < 3; ++queue) {  // in turn: both of NIC a get some
        link->endpoint().post({queue}, {.bytes = kChunkBytes});
      }
    }
  };
  send(400 * kMs);
  const Log a = all_of({by_queue[0], by_queue[2]});
  EXPECT_LE(most_beyond(a, kRate), burst_of(kRate));
  EXPECT_LE(most_beyond(by_queue[1], kRate), burst_of(kRate));
  EXPECT_GT(a.size(), by_queue[1].size() / 2);
  EXPECT_FALSE(by_queue[2].empty());

  // Its connections go over other NICs now, which have not sent less for that.
  link->reconnect({});
  send(200 * kMs);
  EXPECT_LE(most_beyond(all_of({by_queue[0], by_queue[1], by_queue[2]}), 2 * kRate),
            2 * burst_of(kRate));
}

// The uplinks of a rack's jobs.
class PacedUplinks : public PacedTest {
 protected:
  struct Uplink {
    TakerLink* taken = nullptr;
    std::unique_ptr<WorkerLink> link;
  };
  Uplink open(std::vector<std::string> nics, std::vector<uint32_t> chunks,
              std::vector<uint32_t> threads, std::vector<uint32_t> cpus,
              bool second_is_near = false) {
    auto taken = std::make_unique<TakerLink>(now_, std::move(nics));
    taken->other.over_memory = second_is_near;
    LinkLayout layout;
    layout.queue_chunks = std::move(chunks);
    layout.queue_thread = std::move(threads);
    layout.threads = static_cast<uint32_t>(cpus.size());
    layout.thread_cpu = std::move(cpus);
    TakerLink* const at = taken.get();
    return {at, make_paced(std::move(taken), layout, shares_)};
  }
  BudgetShares shares_{{.bytes_per_s = kRate, .clock = [this] { return now_; }}};
};

TEST_F(PacedUplinks, CoresAndJobsShareTheBudgetOfANic) {
  const Uplink one = open({"a", "a"}, {30, 10}, {0, 1}, {4, 5});
  const Uplink two = open({"a", "b"}, {20, 10}, {0, 1}, {4, 5});
  send_for(500 * kMs, {{&one.link->endpoint_of(0), 0},
                       {&one.link->endpoint_of(1), 1},
                       {&two.link->endpoint_of(0), 0},
                       {&two.link->endpoint_of(1), 1}});
  const Log first =  // of core 4
      all_of({one.taken->taker.by_queue[0], two.taken->taker.by_queue[0]});
  const Log& second = one.taken->other.by_queue[1];
  EXPECT_LE(most_beyond(all_of({first, second}), kRate), 2 * burst_of(kRate));
  EXPECT_LE(most_beyond(two.taken->other.by_queue[1], kRate), burst_of(kRate));
  EXPECT_NEAR(part(first, 500 * kMs), 50.0 / 60, 0.02);
  EXPECT_NEAR(part(second, 500 * kMs), 10.0 / 60, 0.02);
  EXPECT_NEAR(part(two.taken->other.by_queue[1], 500 * kMs), 1, 0.02);
}

TEST_F(PacedUplinks, PartsFollowTheJobsThatAreThere) {
  const Uplink one = open({"a"}, {10}, {0}, {4});
  Uplink two = open({"a"}, {30}, {0}, {5});
  send_for(300 * kMs, {{&one.link->endpoint_of(0), 0}});
  EXPECT_NEAR(part(one.taken->taker.by_queue[0], 300 * kMs), 0.25, 0.04);
  two.link.reset();
  one.taken->taker.by_queue[0].clear();
  send_for(300 * kMs, {{&one.link->endpoint_of(0), 0}});
  EXPECT_NEAR(part(one.taken->taker.by_queue[0], 300 * kMs), 1, 0.2);
  EXPECT_LE(most_beyond(one.taken->taker.by_queue[0], kRate), burst_of(kRate));
}

// A parent, or a box under it, on the rack's own host.
TEST_F(PacedUplinks, WhatGoesOverMemoryTakesNothing) {
  const Uplink uplink = open({"", ""}, {10, 30}, {0, 1}, {4, 5}, true);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(uplink.link->endpoint_of(1).post({1}, {.bytes = kChunkBytes}));
  }
  send_for(300 * kMs, {{&uplink.link->endpoint_of(0), 0}});
  EXPECT_NEAR(part(uplink.taken->taker.by_queue[0], 300 * kMs), 1, 0.02);
  EXPECT_LE(most_beyond(uplink.taken->taker.by_queue[0], kRate), burst_of(kRate));
}

// Two jobs, of which one's connections go over another NIC now.
TEST_F(PacedUplinks, APartIsWhereTheConnectionIs) {
  const Uplink one = open({"a"}, {10}, {0}, {4});
  const Uplink two = open({"a", "b"}, {10, 0}, {0, 0}, {5});
  send_for(300 * kMs, {{&one.link->endpoint_of(0), 0}});
  EXPECT_NEAR(part(one.taken->taker.by_queue[0], 300 * kMs), 0.5, 0.04);
  two.link->reconnect({});
  one.taken->taker.by_queue[0].clear();
  send_for(300 * kMs, {{&one.link->endpoint_of(0), 0}, {&two.link->endpoint_of(0), 0}});
  EXPECT_NEAR(part(one.taken->taker.by_queue[0], 300 * kMs), 1, 0.2);
  EXPECT_NEAR(part(two.taken->taker.by_queue[0], 300 * kMs), 1, 0.2);
}

TEST_F(PacedTest, SharedMemoryIsRefused) {
  EXPECT_THROW(make_paced(std::make_unique<TakerLink>(now_, std::vector<std::string>{"a"}, true), 1,
                          {.bytes_per_s = kRate}),
               Error);
}

}  // namespace paced_test
}  // namespace phub
