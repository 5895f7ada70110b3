// phub.h where threads, completions and misfortune meet: every call ends, and says why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/worker/box.h"
#include "transport/message_fields.h"
#include "worker/phub.h"

namespace phub {
namespace {

using ::testing::AllOf;
using testing::Box;
using ::testing::Each;
using testing::each_rank;
using ::testing::Field;
using ::testing::HasSubstr;

#define EXPECT_OK(call) EXPECT_EQ(call, PHUB_OK) << phub_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, PHUB_OK) << phub_last_error()

struct Job {
  std::string name;
  int64_t ranks = 1;
  std::vector<std::pair<const char*, const char*>> options = {};
  std::vector<uint64_t> keys = {100, 30000};
};

phub_worker* join(const Box& box, const Job& job, int64_t rank = 0) {
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  EXPECT_OK(phub_options_from_environment(&options));  // PHUB_TRANSPORT
  EXPECT_OK(phub_options_set(options, "server", box.address().c_str()));
  EXPECT_OK(phub_options_set(options, "job", job.name.c_str()));
  EXPECT_OK(phub_options_set_number(options, "world_size", job.ranks));
  EXPECT_OK(phub_options_set_number(options, "rank", rank));
  for (const auto& [name, value] : job.options) EXPECT_OK(phub_options_set(options, name, value));
  for (size_t k = 0; k < job.keys.size(); ++k) {
    EXPECT_OK(phub_options_add_key(options, std::to_string(k).c_str(), job.keys[k]));
  }
  EXPECT_OK(phub_worker_create(options, &worker));
  EXPECT_OK(phub_options_destroy(options));
  return worker;
}

// What completions said, in the order in which they did.
class Completed {
 public:
  struct One {
    size_t key;
    uint64_t round;
    phub_code code;
    std::string message;
    std::thread::id thread;
  };
  static void call(void* user_data, size_t key, uint64_t round, phub_code code,
                   const char* message) {
    auto& self = *static_cast<Completed*>(user_data);
    const std::lock_guard lock(self.mutex_);
    self.all_.push_back({key, round, code, message, std::this_thread::get_id()});
    self.changed_.notify_all();
  }
  std::vector<One> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return all_.size() >= count; }));
    return all_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<One> all_;
};

TEST(CAbi, CompletionsComeOnceForEveryPushOnOneThreadOfTheirOwn) {
  Box box;
  const Job job{.name = "completions", .ranks = 2, .keys = {1, 100, 30000, 70000}};
  constexpr uint64_t kRounds = 20;
  each_rank(2, [&](uint32_t rank) {
    phub_worker* worker = join(box, job, rank);
    Completed completed;
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t key = job.keys.size(); key-- > 0;) {
        EXPECT_OK(phub_push_then(worker, key, 0, Completed::call, &completed));
      }
      if (round % 2 == 0) {
        EXPECT_OK(phub_wait_all(worker));
      }
      completed.wait_for(round * job.keys.size());
    }
    const auto all = completed.wait_for(kRounds * job.keys.size());
    EXPECT_EQ(all.size(), kRounds * job.keys.size());
    EXPECT_THAT(
        all, Each(AllOf(Field(&Completed::One::code, PHUB_OK), Field(&Completed::One::message, ""),
                        Field(&Completed::One::thread, all.front().thread))));
    EXPECT_NE(all.front().thread, std::this_thread::get_id());
    std::vector<uint64_t> last(job.keys.size());
    for (const auto& one : all) EXPECT_EQ(one.round, ++last[one.key]);
    EXPECT_OK(phub_worker_destroy(worker));
  });
}

// A result that is here is told of, though another thread waits for one that is not.
TEST(CAbi, ACompletionDoesNotWaitForOtherKeys) {
  Box box;
  const Job job{.name = "apart", .ranks = 2};
  Completed completed;
  std::atomic<bool> told = false;
  each_rank(2, [&](uint32_t rank) {
    phub_worker* worker = join(box, job, rank);
    if (rank == 0) {
      EXPECT_OK(phub_push(worker, 1, 0));
      std::thread other([&] { EXPECT_OK(phub_wait(worker, 1)); });
      EXPECT_OK(phub_push_then(worker, 0, 0, Completed::call, &completed));
      completed.wait_for(1);
      told = true;
      other.join();
    } else {
      EXPECT_OK(phub_push(worker, 0, 0));
      while (!told) {
        size_t outstanding = 0;
        EXPECT_OK(phub_poll(worker, &outstanding));
        std::this_thread::yield();
      }
      EXPECT_OK(phub_push(worker, 1, 0));
    }
    EXPECT_OK(phub_wait_all(worker));
    EXPECT_OK(phub_worker_destroy(worker));
  });
}

struct Chain {
  phub_worker* worker;
  std::atomic<int> left;
  std::vector<phub_code> refused;
};

TEST(CAbi, ACompletionMayPushButNeitherWaitNorDestroy) {
  Box box;
  Chain chain{.worker = join(box, {.name = "chain"}), .left = 50, .refused = {}};
  const phub_completion next = [](void* user_data, size_t key, uint64_t, phub_code code,
                                  const char*) {
    auto& self = *static_cast<Chain*>(user_data);
    if (code != PHUB_OK) self.refused.push_back(code);
    self.refused.push_back(phub_wait(self.worker, key));
    self.refused.push_back(phub_barrier(self.worker));
    self.refused.push_back(phub_worker_destroy(self.worker));
    if (self.left > 1) {
      EXPECT_OK(phub_push_null(self.worker, key));
    }
    --self.left;
  };
  for (int i = 0; i < 50; ++i) {
    EXPECT_OK(phub_push_then(chain.worker, 0, 0, next, &chain));
    while (chain.left == 50 - i) std::this_thread::yield();
    EXPECT_OK(phub_wait_all(chain.worker));
  }
  EXPECT_EQ(chain.refused.size(), 150u);
  EXPECT_THAT(chain.refused, Each(PHUB_WRONG_THREAD));
  EXPECT_OK(phub_worker_destroy(chain.worker));
}

TEST(CAbi, DestroyingEndsTheCallsOfOtherThreadsAndTheCompletionsThatAreDue) {
  Box box;
  const Job job{.name = "ended", .ranks = 2, .options = {{"on_loss", "shrink"}}};
  std::atomic<bool> over = false;
  each_rank(2, [&](uint32_t rank) {
    phub_worker* worker = join(box, job, rank);
    if (rank == 0) {
      Completed completed;
      EXPECT_OK(phub_wait_all(worker));
      EXPECT_OK(phub_push_then(worker, 0, 0, Completed::call, &completed));  // never complete
      EXPECT_OK(phub_push(worker, 1, 0));
      std::vector<std::thread> waiters;
      std::atomic<int> ended = 0;
      for (int i = 0; i < 4; ++i) {
        waiters.emplace_back([&, i] {
          const phub_code code = i == 0 ? phub_barrier(worker) : phub_wait(worker, 1);
          EXPECT_NE(code, PHUB_OK) << i;
          ++ended;
        });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(ended, 0);
      EXPECT_OK(phub_worker_destroy(worker));
      for (std::thread& waiter : waiters) waiter.join();
      const auto all = completed.wait_for(1);
      ASSERT_EQ(all.size(), 1u);
      EXPECT_EQ(all[0].code, PHUB_FENCED);
      EXPECT_EQ(all[0].round, 1u);
      EXPECT_EQ(phub_wait(worker, 0), PHUB_BAD_HANDLE);
      over = true;
    } else {
      EXPECT_OK(phub_wait_all(worker));
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_OK(phub_worker_destroy(worker));
    }
  });
}

TEST(CAbi, AJobThatEndsIsAnErrorOfEveryCallAndCompletion) {
  Box box;
  const Job job{.name = "removed", .ranks = 2, .options = {{"lease_ms", "500"}}};
  std::atomic<int> ready = 0;
  each_rank(2, [&](uint32_t rank) {
    phub_worker* worker = join(box, job, rank);
    Completed completed;
    EXPECT_OK(phub_wait_all(worker));
    if (rank == 0) {
      EXPECT_OK(phub_push_then(worker, 0, 0, Completed::call, &completed));
    }
    ++ready;
    while (ready < 2) std::this_thread::yield();
    if (rank == 0) {
      EXPECT_OK(phub_job_remove(box.address().c_str(), "removed"));
      const auto all = completed.wait_for(1);
      EXPECT_NE(all[0].code, PHUB_OK);
      EXPECT_NE(all[0].message, "");
      const phub_code code = phub_push(worker, 1, 0);
      EXPECT_EQ(code, all[0].code) << phub_last_error();
      ++ready;
    }
    while (ready < 3) std::this_thread::yield();
    EXPECT_OK(phub_worker_destroy(worker));
  });
}

// No two pushes of a key at once, whoever asks for them.
TEST(CAbi, ThreadsThatPushTheSameKeyGetAnErrorOrTheirTurn) {
  Box box;
  phub_worker* worker = join(box, {.name = "crowd"});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const phub_code code = phub_push(worker, i % 2, 0);
        if (code == PHUB_INVALID) {
          EXPECT_THAT(phub_last_error(), HasSubstr("another thread"));
        } else {
          EXPECT_EQ(code, PHUB_OK) << phub_last_error();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_OK(phub_wait_all(worker));
  EXPECT_OK(phub_worker_destroy(worker));
}

TEST(CAbi, ABroadcastThatFailsLetsGoOfTheCallersMemory) {
  Box box;
  const Job job{.name = "late",
                .ranks = 2,
                .options = {{"initial", "broadcast"}, {"wait_timeout_ms", "200"}},
                .keys = {3'000'000}};
  std::atomic<bool> over = false;
  each_rank(2, [&](uint32_t rank) {
    phub_worker* worker = join(box, job, rank);
    if (rank == 0) {
      {
        std::vector<float> initial(3'000'000, 1.0f);
        const phub_code code = phub_broadcast(worker, initial.data(), initial.size());
        EXPECT_TRUE(code == PHUB_OK || code == PHUB_TIMEOUT) << phub_last_error();
      }
      phub_push(worker, 0, 0);
      EXPECT_EQ(phub_wait(worker, 0), PHUB_TIMEOUT);  // the other rank pushes nothing
      EXPECT_THAT(phub_last_error(), HasSubstr("200 ms"));
      over = true;
    }
    while (!over) std::this_thread::yield();
    EXPECT_OK(phub_worker_destroy(worker));
  });
}

// Takes the names of a message's fields.
struct FieldNames {
  template <class M>
  void required(std::string_view name, M JobSpec::*, json::Bounds = {}) {
    constexpr bool option = std::is_same_v<M, std::string> || std::is_same_v<M, uint32_t>;
    if (option) names.emplace_back(name);
  }
  template <class M>
  void optional(std::string_view name, M JobSpec::*member, json::Bounds = {}) {
    required(name, member);
  }
  std::vector<std::string> names;
};

TEST(CAbi, EveryFieldOfAJobIsAnOption) {
  FieldNames fields_of_job;
  fields(fields_of_job, static_cast<const JobSpec*>(nullptr));
  EXPECT_GT(fields_of_job.names.size(), 10u);
  phub_options* options = nullptr;
  ASSERT_OK(phub_options_create(&options));
  for (std::string& name : fields_of_job.names) {
    if (name == "name") name = "job";
    EXPECT_OK(phub_options_set(options, name.c_str(), "1"));
  }
  EXPECT_OK(phub_options_destroy(options));
}

TEST(CAbi, HandlesAreNotGivenOutTwice) {
  std::vector<phub_options*> all(100);
  for (auto& options : all) {
    ASSERT_OK(phub_options_create(&options));
    ASSERT_OK(phub_options_destroy(options));
  }
  for (phub_options* options : all) {
    EXPECT_EQ(phub_options_set(options, "job", "x"), PHUB_BAD_HANDLE);
    EXPECT_THAT(phub_last_error(), HasSubstr("phub_options_set: this phub_options was destroyed"));
  }
}

TEST(CAbi, LongMessagesAndTextsAreCutBetweenCharacters) {
  phub_options* options = nullptr;
  ASSERT_OK(phub_options_create(&options));
  std::string longer;
  for (int i = 0; i < 5000; ++i) longer += "ü";
  EXPECT_EQ(phub_options_set(options, longer.c_str(), "1"), PHUB_INVALID);
  EXPECT_LT(std::strlen(phub_last_error()), 2048u);
  EXPECT_EQ(phub_options_set(options, "world_size", longer.c_str()), PHUB_INVALID);
  EXPECT_OK(phub_options_destroy(options));
}

TEST(CAbi, TheServersRefusalsKeepTheirCodes) {
  Box box;
  // Planning the huge job below takes seconds where everything is slow, and nobody is heard
  // meanwhile.
  phub_worker* first =
      join(box, {.name = "refused", .options = {{"lease_ms", "60000"}}, .keys = {10}});
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  ASSERT_OK(phub_options_from_environment(&options));
  ASSERT_OK(phub_options_set(options, "server", box.address().c_str()));
  ASSERT_OK(phub_options_set(options, "job", "refused"));
  ASSERT_OK(phub_options_set(options, "lease_ms", "60000"));
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_INVALID);
  EXPECT_THAT(phub_last_error(), HasSubstr("phub_worker_create: keys"));
  ASSERT_OK(phub_options_add_key(options, "0", 11));
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_MISMATCH);
  EXPECT_THAT(phub_last_error(), HasSubstr("11 elements"));
  ASSERT_OK(phub_options_set(options, "job", "huge"));
  ASSERT_OK(phub_options_add_key(options, "1", uint64_t{1} << 33));
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_FULL);
  ASSERT_OK(phub_options_set(options, "server", "127.0.0.1:1"));
  ASSERT_OK(phub_options_set(options, "connect_timeout_ms", "10"));
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_UNAVAILABLE);
  EXPECT_EQ(worker, nullptr);
  EXPECT_OK(phub_options_destroy(options));
  const char* name = "leaning_rate";
  const double value = 0.1, nan = std::nan("");
  EXPECT_EQ(phub_set_hyper(first, &name, &value, 1, nullptr), PHUB_INVALID);
  EXPECT_THAT(phub_last_error(), HasSubstr("leaning_rate"));
  name = "lr";
  EXPECT_EQ(phub_set_hyper(first, &name, &nan, 1, nullptr), PHUB_INVALID);
  EXPECT_OK(phub_set_hyper(first, &name, &value, 1, nullptr));
  EXPECT_OK(phub_worker_destroy(first));
}

}  // namespace
}  // namespace phub
