// A core whose jobs fail: each of them ends with a report, and the core goes on with the others.
#include "phub/core/core.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "phub/clock.h"
#include "tests/phub/core_job_rig.h"
#include "transport/error.h"

namespace phub::testing {
namespace core_test {

// Fails where it is told to, as an endpoint whose device is gone does.
class FailingEndpoint final : public FakeEndpoint {
 public:
  size_t poll(std::span<Arrival> out) override {
    if (polls_fail) fail(ErrorCode::kInternal, "the device is gone");
    return FakeEndpoint::poll(out);
  }
  bool arm(std::span<const uint32_t> after) override {
    if (arms_fail) throw std::runtime_error("cannot be armed");
    return FakeEndpoint::arm(after);
  }
  void attach(uint32_t rank, uint32_t incarnation) override {
    if (attaches_fail) fail(ErrorCode::kFull, "no queue pair");
    FakeEndpoint::attach(rank, incarnation);
  }
  int wake_fd() const override { return wake; }

  bool polls_fail = false, arms_fail = false, attaches_fail = false;
  int wake = -1;
};

class CoreTest : public ::testing::Test {
 protected:
  CoreTest() : bad_({.chunks = 1}), good_({.chunks = 1}) {}

  void add(CoreJob& job) { tell({.type = CoreMessage::kAddJob, .job = &job}); }
  void tell(const CoreMessage& message) { ASSERT_TRUE(core_.send(message)); }
  // Steps until nothing is left to do; what the core reported meanwhile.
  std::vector<CoreReport> run() {
    std::vector<CoreReport> reports;
    for (int i = 0; i < 100; ++i) {
      const bool moved = core_.step();
      CoreReport report;
      while (core_.receive(report)) reports.push_back(report);
      if (!moved) break;
    }
    return reports;
  }
  static size_t count(const std::vector<CoreReport>& reports, CoreReport::Type type,
                      const CoreJob& job) {
    return static_cast<size_t>(std::ranges::count_if(reports, [&](const CoreReport& report) {
      return report.type == type && report.job == &job;
    }));
  }
  // A round of the good job ends with the sum of its ranks.
  void expect_going_on() {
    ++round_;
    for (const uint32_t rank : {0u, 1u, 2u}) good_.push(rank, 0, round_, CoreJobRig::digit(rank));
    run();
    EXPECT_EQ(good_.take_posts().size(), 3u);
    EXPECT_NE(good_.result(0), before_);
    before_ = good_.result(0);
  }

  Core core_{0};
  BasicCoreJobRig<FailingEndpoint> bad_;
  CoreJobRig good_;
  uint64_t round_ = 0;
  float before_ = 0;
};

TEST_F(CoreTest, AFailingEndpointEndsItsJobAndNoOther) {
  add(*bad_.job);
  add(*good_.job);
  EXPECT_EQ(count(run(), CoreReport::kFailed, *bad_.job), 0u);
  bad_.endpoint.polls_fail = true;
  const std::vector<CoreReport> reports = run();
  EXPECT_EQ(count(reports, CoreReport::kFailed, *bad_.job), 1u);
  EXPECT_EQ(count(reports, CoreReport::kFailed, *good_.job), 0u);
  EXPECT_EQ(bad_.job->failure(), "the device is gone");
  expect_going_on();
  EXPECT_EQ(count(run(), CoreReport::kFailed, *bad_.job), 0u) << "once";
}

// The control thread counts answers: whatever is asked of a job that failed, something comes.
TEST_F(CoreTest, EveryMessageToAFailedJobIsAnswered) {
  add(*bad_.job);
  add(*good_.job);
  bad_.endpoint.polls_fail = bad_.endpoint.attaches_fail = true;
  run();
  Boundary boundary{.round = 1};
  boundary.admitted.push_back(bad_.admission(1, 2, 1));
  Probe probe;
  probe.arrivals.resize(3), probe.waited_for.resize(1);
  tell({.type = CoreMessage::kHold, .job = bad_.job.get()});
  tell({.type = CoreMessage::kCommit, .job = bad_.job.get(), .boundary = &boundary});
  tell({.type = CoreMessage::kProbe, .job = bad_.job.get(), .probe = &probe});
  tell({.type = CoreMessage::kDetach, .job = bad_.job.get(), .rank = 2});
  tell({.type = CoreMessage::kAttach, .job = bad_.job.get(), .rank = 2, .incarnation = 1});
  tell({.type = CoreMessage::kRemoveJob, .job = bad_.job.get()});
  const std::vector<CoreReport> reports = run();
  for (const auto type : {CoreReport::kHeld, CoreReport::kCommitted, CoreReport::kProbed,
                          CoreReport::kDetached, CoreReport::kAttached, CoreReport::kRemoved}) {
    EXPECT_EQ(count(reports, type, *bad_.job), 1u) << static_cast<int>(type);
  }
  EXPECT_TRUE(bad_.endpoint.attached.empty()) << "it is let go of";
  expect_going_on();
}

TEST_F(CoreTest, AnEndpointThatCannotBeWatchedEndsItsJob) {
  bad_.endpoint.wake = open("/dev/null", O_RDONLY | O_CLOEXEC);  // epoll refuses it
  add(*bad_.job);
  add(*good_.job);
  EXPECT_EQ(count(run(), CoreReport::kFailed, *bad_.job), 1u);
  EXPECT_NE(bad_.job->failure().find("epoll_ctl"), std::string::npos) << bad_.job->failure();
  expect_going_on();
  close(bad_.endpoint.wake);
}

TEST_F(CoreTest, ACoreDoesNotSleepOnAJobThatFailsToArm) {
  add(*bad_.job);
  add(*good_.job);
  run();
  bad_.endpoint.arms_fail = true;
  int timeout_ms = 0;
  EXPECT_FALSE(core_.arm(timeout_ms)) << "there is a report to send";
  core_.disarm();
  EXPECT_EQ(count(run(), CoreReport::kFailed, *bad_.job), 1u);
  EXPECT_TRUE(core_.arm(timeout_ms));
  core_.disarm();
  expect_going_on();
}

// The others of a round wait for what a job pushes again as soon as its results are there.
template <typename Rig>
void push_again(Rig& rig, uint32_t ranks, std::vector<uint64_t>& rounds) {
  for (const std::string& post : rig.take_posts()) {
    if (!post.starts_with("0:")) continue;  // what rank 0 got, everyone got
    const auto chunk = static_cast<uint32_t>(std::stoul(post.substr(2)));
    ++rounds[chunk];
    for (uint32_t r = 0; r < ranks; ++r) {
      rig.arrive(r, {chunk, static_cast<uint32_t>(rounds[chunk] & 0xff), ImmKind::kData});
    }
  }
}

// One with many ranks and large chunks, the other with few and small ones; both always have work.
TEST(CoreShares, NeitherOfTwoJobsGetsMuchLessThanHalfOfTheBytes) {
  Core core(0);
  const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
  CoreJobRig large({.parameters = {.max_ranks = 8},
                    .chunks = 6,
                    .elements = 1 << 16,
                    .expected = {0, 1, 2, 3, 4, 5, 6, 7}});
  CoreJobRig small({.chunks = 200, .elements = 8192});
  ASSERT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = large.job.get()}));
  ASSERT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = small.job.get()}));
  std::vector<uint64_t> of_large(6, 1), of_small(200, 1);
  for (uint32_t c = 0; c < 6; ++c) large.push_all(all, c, 1);
  for (uint32_t c = 0; c < 200; ++c) small.push_all(std::span(all).first(3), c, 1);
  for (int pass = 0; pass < 400; ++pass) {
    core.step();
    push_again(large, 8, of_large);
    push_again(small, 3, of_small);
  }
  const auto sum = [](const std::vector<uint64_t>& rounds) {
    double completed = 0;
    for (const uint64_t round : rounds) completed += static_cast<double>(round - 1);
    return completed;
  };
  const double large_bytes = sum(of_large) * (1 << 16) * 9, small_bytes = sum(of_small) * 8192 * 4;
  EXPECT_GE(large_bytes, 0.4 * (large_bytes + small_bytes));
  EXPECT_GE(small_bytes, 0.4 * (large_bytes + small_bytes));
}

// Counts how often it is asked and given something, and can wake its core.
class WakingEndpoint final : public FakeEndpoint {
 public:
  WakingEndpoint() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~WakingEndpoint() override { close(wake_); }
  size_t poll(std::span<Arrival> out) override {
    ++polls;
    return FakeEndpoint::poll(out);
  }
  bool post(QueuePair to, const Write& write) override {
    ++attempts;
    return FakeEndpoint::post(to, write);
  }
  int wake_fd() const override { return wake_; }
  void wake() const {
    const uint64_t one = 1;
    ASSERT_EQ(write(wake_, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  uint64_t polls = 0, attempts = 0;

 private:
  int wake_;
};
using WakingRig = BasicCoreJobRig<WakingEndpoint>;

// Goes on as a test says, and by so much with each look at it.
class SetClock final : public Clock {
 public:
  explicit SetClock(uint64_t per_look = 0) : per_look_(per_look) {}
  uint64_t now_ms() const override { return now += per_look_; }
  mutable uint64_t now = 1000;

 private:
  uint64_t per_look_;
};

// A rank joined and never connected its data: its queue has no room for the result it is owed.
std::unique_ptr<WakingRig> make_debtor(Core& core) {
  auto rig = std::make_unique<WakingRig>(WakingRig::Options{.chunks = 1});
  EXPECT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = rig->job.get()}));
  rig->endpoint.room = 0;
  const uint32_t ranks[] = {0, 1, 2};
  rig->push_all(ranks, 0, 1);
  while (core.step()) {
  }
  EXPECT_TRUE(rig->job->owes());
  return rig;
}

// How long the core would sleep now.
int timeout_of(Core& core) {
  int timeout_ms = 0;
  while (!core.arm(timeout_ms)) {
    core.disarm();
    core.step();
  }
  core.disarm();
  return timeout_ms;
}

TEST(CoreShares, WhatHasNoRoomIsTriedMoreAndMoreSeldom) {
  const SetClock clock;
  Core core(0, clock);
  const auto debtor = make_debtor(core);
  for (int sleeps = 0; sleeps < 13; ++sleeps) {
    EXPECT_GE(timeout_of(core), 1 << sleeps) << "after " << sleeps;
    core.step();
  }
  EXPECT_LE(timeout_of(core), 5000) << "and no more seldom than that";

  // What happens to the job may have made room.
  ASSERT_TRUE(core.send({.type = CoreMessage::kHold, .job = debtor->job.get()}));
  core.step();
  EXPECT_LE(timeout_of(core), 2);
  debtor->endpoint.room = 3;
  core.step();
  EXPECT_EQ(debtor->take_posts().size(), 3u);
  EXPECT_FALSE(debtor->job->owes());
  EXPECT_EQ(timeout_of(core), -1) << "nothing is due any more";
}

TEST(CoreShares, JobsThatHaveWaitedForLongTryAgainTogether) {
  const SetClock clock(1);  // each of them waits from another time on
  Core core(0, clock);
  std::vector<std::unique_ptr<WakingRig>> debtors;
  for (int i = 0; i < 30; ++i) debtors.push_back(make_debtor(core));
  for (int sleeps = 0; sleeps < 13; ++sleeps) timeout_of(core);
  std::set<uint64_t> times;
  for (const auto& debtor : debtors) times.insert(debtor->job->turn.retry_ms);
  EXPECT_EQ(times.size(), 1u);
}

TEST(CoreShares, JobsWithoutRoomTakeNothingFromABusyOne) {
  SetClock clock;
  Core core(0, clock);
  std::vector<std::unique_ptr<WakingRig>> debtors;
  for (int i = 0; i < 30; ++i) debtors.push_back(make_debtor(core));
  CoreJobRig busy({.chunks = 20});
  ASSERT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = busy.job.get()}));
  const uint32_t ranks[] = {0, 1, 2};
  std::vector<uint64_t> rounds(20, 1);
  for (uint32_t c = 0; c < 20; ++c) busy.push_all(ranks, c, 1);
  const auto attempts = [&debtors] {
    uint64_t all = 0;
    for (const auto& rig : debtors) all += rig->endpoint.attempts;
    return all;
  };
  const auto run = [&](int passes) {
    for (int pass = 0; pass < passes; ++pass) {
      clock.now += pass % 4 == 0;
      core.step();
      push_again(busy, 3, rounds);
    }
  };
  run(200);
  const uint64_t before = attempts(), completed = rounds[0], begin = clock.now;
  run(5000);
  const auto took = static_cast<double>(clock.now - begin);
  EXPECT_GT(rounds[0], completed + 1000);
  // Each time one that was put aside is tried again, so is each of its ranks, for two passes at
  // most; after 1, 2, 4 … ms.
  const double retries = 1 + std::log2(1 + took) + took / 4096;
  EXPECT_LE(static_cast<double>(attempts() - before), 30 * 2 * 3 * retries)
      << "in " << took << " ms";
}

TEST(CoreShares, JobsThatDoNothingAreNotLookedAt) {
  Core core(0);
  CoreJobRig busy({.chunks = 20});
  ASSERT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = busy.job.get()}));
  std::vector<std::unique_ptr<WakingRig>> idle;
  for (int i = 0; i < 30; ++i) {
    idle.push_back(std::make_unique<WakingRig>(WakingRig::Options{.chunks = 1}));
    ASSERT_TRUE(core.send({.type = CoreMessage::kAddJob, .job = idle.back()->job.get()}));
  }
  const uint32_t ranks[] = {0, 1, 2};
  std::vector<uint64_t> rounds(20, 1);
  for (uint32_t c = 0; c < 20; ++c) busy.push_all(ranks, c, 1);
  const auto run = [&](int passes) {
    for (int pass = 0; pass < passes; ++pass) {
      core.step();
      push_again(busy, 3, rounds);
    }
  };
  run(200);
  const auto polls = [&] {
    uint64_t all = 0;
    for (const auto& rig : idle) all += rig->endpoint.polls;
    return all;
  };
  const uint64_t before = polls(), completed = rounds[0];
  run(500);
  EXPECT_EQ(polls(), before);
  EXPECT_GT(rounds[0], completed);

  // What comes for one of them wakes that one, soon.
  const uint64_t neighbours = idle[6]->endpoint.polls + idle[8]->endpoint.polls;
  idle[7]->push_all(ranks, 0, 1);
  idle[7]->endpoint.wake();
  run(10);
  EXPECT_EQ(idle[7]->take_posts().size(), 3u);
  EXPECT_EQ(idle[6]->endpoint.polls + idle[8]->endpoint.polls, neighbours);
  // So does a message; a probe once, since the first time a job waits for one rank alone.
  Probe probe;
  probe.arrivals.resize(3), probe.waited_for.resize(1);
  const CoreMessage ask{.type = CoreMessage::kProbe, .job = idle[3]->job.get(), .probe = &probe};
  ASSERT_TRUE(core.send(ask));
  run(200);
  const uint64_t quiet = idle[3]->endpoint.polls;
  ASSERT_TRUE(core.send(ask));
  run(10);
  EXPECT_EQ(idle[3]->endpoint.polls, quiet);
  ASSERT_TRUE(core.send({.type = CoreMessage::kHold, .job = idle[3]->job.get()}));
  run(10);
  EXPECT_GT(idle[3]->endpoint.polls, quiet);
}

}  // namespace core_test
}  // namespace phub::testing
