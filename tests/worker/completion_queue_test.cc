// The order in which announced pushes end, and when they are too late; and that a push has its own
// time limit, whatever the others have.
#include "worker/progress/completion_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "worker/completions.h"

namespace phub::testing {
namespace completion_queue_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using End = CompletionQueue::End;

// Against the rules, said once more with a list that is searched.
class Model {
 public:
  struct One {
    Pushed pushed;
    uint64_t deadline;
  };
  void expect(const Pushed& pushed, uint64_t deadline) { open.push_back({pushed, deadline}); }
  void arrived(size_t key) {
    for (size_t i = 0; i < open.size(); ++i) {
      if (open[i].pushed.key != key) continue;
      ended.push_back({open[i].pushed, End::kHere});
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }
  void expire(uint64_t now) {
    for (size_t i = 0; i < open.size();) {
      if (open[i].deadline >= now) {
        ++i;
        continue;
      }
      ended.push_back({open[i].pushed, End::kLate});
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  std::vector<One> open;
  std::vector<std::pair<Pushed, End>> ended;
};

TEST(CompletionQueue, EndsPushesAsAListThatIsSearchedWould) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr size_t kKeys = 7;
  CompletionQueue queue(kKeys);
  Model model;
  std::vector<uint64_t> rounds(kKeys);
  const auto time = [](uint64_t ms) { return CompletionQueue::Time(milliseconds(ms)); };
  uint64_t now = 1000, taken = 0;
  std::vector<char> tags(1000);
  for (int step = 0; step < 5000; ++step) {
    const size_t key = random() % kKeys;
    const bool open = std::any_of(model.open.begin(), model.open.end(),
                                  [&](const auto& one) { return one.pushed.key == key; });
    switch (random() % 5) {
      case 0:
      case 1:
        if (open) break;
        ++rounds[key];
        queue.expect({key, rounds[key]}, &tags[rounds[key] % tags.size()], time(now + 20));
        model.expect({key, rounds[key]}, now + 20);
        break;
      case 2:
        queue.arrived(key);
        model.arrived(key);
        break;
      case 3:
        now += random() % 8;
        queue.expire(time(now));
        model.expire(now);
        break;
      case 4:
        if (queue.ended() == 0) break;
        const CompletionQueue::Ended ended = queue.pop();
        ASSERT_LT(taken, model.ended.size());
        const auto& [pushed, how] = model.ended[taken++];
        ASSERT_EQ(ended.pushed.key, pushed.key);
        ASSERT_EQ(ended.pushed.round, pushed.round);
        ASSERT_EQ(ended.end, how);
        ASSERT_EQ(ended.tag, &tags[pushed.round % tags.size()]);
        break;
    }
    ASSERT_EQ(queue.expected(), model.open.size());
    ASSERT_EQ(queue.ended(), model.ended.size() - taken);
  }
  EXPECT_GT(taken, 100u);
  const size_t left = queue.expected(), ended = queue.ended();
  queue.fail_all();
  EXPECT_EQ(queue.expected(), 0u);
  EXPECT_EQ(queue.ended(), ended + left);
}

// A result that is due when its push is forgotten comes to nothing, and the key can be pushed
// again.
TEST(CompletionQueue, WhatIsForgottenDoesNotComeBack) {
  CompletionQueue queue(3);
  int tag = 0;
  for (const size_t key : {0, 1}) queue.expect({key, 1}, &tag, {});
  queue.arrived(0);
  queue.forget();
  EXPECT_EQ(queue.expected(), 0u);
  EXPECT_EQ(queue.ended(), 0u);
  queue.arrived(1);
  queue.expire(CompletionQueue::Time::max());
  queue.fail_all();
  EXPECT_EQ(queue.ended(), 0u);
  queue.expect({1, 2}, &tag, {});
  queue.arrived(1);
  ASSERT_EQ(queue.ended(), 1u);
  EXPECT_EQ(queue.pop().pushed.round, 2u);
}

struct Said {
  std::mutex mutex;
  std::map<size_t, std::optional<ErrorCode>> of_key;  // nothing: the result is here

  Completions::Callback callback() {
    return [this](const Pushed& pushed, const Error* error) {
      const std::lock_guard lock(mutex);
      of_key[pushed.key] = error == nullptr ? std::nullopt : std::optional(error->code());
    };
  }
  bool knows(size_t key) {
    const std::lock_guard lock(mutex);
    return of_key.contains(key);
  }
  void await(size_t key) {
    for (int i = 0; i < 20000 && !knows(key); ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(knows(key)) << key;
  }
};

// Key 0 never comes; key 1 is pushed when half of key 0's time is over, and comes when all of it
// is: in time.
TEST(Completions, ThePushThatIsLateFailsAlone) {
  Box box;
  JobSpec spec;
  spec.name = "late";
  spec.keys = {{.name = "never", .elements = 100}, {.name = "later", .elements = 100}};
  spec.world_size = 2;
  spec.lease_ms = 60'000;
  spec.progress_limit_ms = 600'000;
  Said said;
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    options.wait_timeout_ms = 6000;
    Worker worker(options);
    worker.wait_all();
    if (rank == 0) {
      Completions completions(worker);
      completions.push(0, 0, said.callback());
      std::this_thread::sleep_for(milliseconds(3000));
      completions.push(1, 0, said.callback());
      EXPECT_FALSE(said.knows(0));
      said.await(0);
      said.await(1);
    } else {
      said.await(0);
      worker.push(1);
      worker.wait(1);
      said.await(1);
    }
  });
  EXPECT_EQ(said.of_key[0], ErrorCode::kTimeout);
  EXPECT_EQ(said.of_key[1], std::nullopt);
}

// Over shared memory nobody looks for results but the thread that waits for them: when it comes too
// late to look, the result did not come too late.
TEST(Completions, AResultThatIsHereIsNotLate) {
  Box box(1);  // one core: the result of the first key is out before it takes the second one
  JobSpec spec;
  spec.name = "here";
  spec.keys = {{.name = "first", .elements = 100}, {.name = "second", .elements = 100}};
  spec.world_size = 2;
  spec.lease_ms = spec.progress_limit_ms = 600'000;
  std::atomic<bool> here{false};
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    if (rank == 0) options.wait_timeout_ms = 2000;
    Worker worker(options);
    worker.wait_all();
    if (rank == 0) {
      worker.push(0, {.announced = true});
      const auto late = steady_clock::now() + milliseconds(2100);
      worker.push(1);
      while (!here) std::this_thread::sleep_for(milliseconds(1));
      std::this_thread::sleep_until(late);
      const auto one = worker.wait_any();
      ASSERT_TRUE(one);
      EXPECT_EQ(one->pushed.key, 0u);
      EXPECT_FALSE(one->error) << one->error->what();
    } else {
      worker.push_pull(0);
      worker.push_pull(1);
      here = true;
    }
  });
}

// What was announced without a tag is not the thread's to call back.
TEST(Completions, APushOfOthersIsPassedOver) {
  Box box;
  JobSpec spec;
  spec.name = "others";
  spec.keys = {{.name = "theirs", .elements = 32}, {.name = "ours", .elements = 32}};
  Worker worker(box.options(spec));
  worker.wait_all();
  worker.push(0, {.announced = true});
  worker.wait(0);
  Said said;
  Completions completions(worker);
  completions.push(1, 0, said.callback());
  said.await(1);
  EXPECT_FALSE(said.knows(0));
}

// A failure that is noticed just when the thread goes to sleep, with nothing to wait for, wakes it.
TEST(Completions, AThreadWithNothingDueEndsWithItsWorker) {
  Box box;
  JobSpec spec;
  spec.keys = {{.name = "w", .elements = 32}};
  for (int i = 0; i < 100; ++i) {
    spec.name = "idle" + std::to_string(i);
    Worker worker(box.options(spec));
    worker.wait_all();
    std::atomic<bool> told = false;
    Completions completions(worker);
    completions.push(0, 0, [&](const Pushed&, const Error*) { told = true; });
    while (!told) std::this_thread::yield();
    worker.leave();
    completions.stop();
    EXPECT_THROW(completions.push(0, 0, [](const Pushed&, const Error*) {}), Error);
  }
}

// Pushes do not wake a thread that sleeps until anything comes, nor those that wait for others.
TEST(Completions, ThousandsOfKeysAreToldOfOnceEach) {
  Box box;
  JobSpec spec;
  spec.name = "many";
  for (int k = 0; k < 5000; ++k) spec.keys.push_back({.name = std::to_string(k), .elements = 32});
  spec.world_size = 2;
  spec.lease_ms = 60'000;
  constexpr uint64_t kRounds = 3;
  each_worker(box, spec, [&](Worker& worker, uint32_t) {
    Completions completions(worker);
    std::atomic<uint64_t> told = 0, wrong = 0;
    std::vector<uint64_t> last(worker.keys());
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t key = 0; key < worker.keys(); ++key) {
        completions.push(key, 0, [&](const Pushed& pushed, const Error* error) {
          wrong += error != nullptr || pushed.round != ++last[pushed.key];
          ++told;
        });
      }
      while (told < round * worker.keys()) std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(told, kRounds * worker.keys());
    EXPECT_EQ(wrong, 0u);
    worker.barrier();
  });
}

}  // namespace completion_queue_test
}  // namespace phub::testing
