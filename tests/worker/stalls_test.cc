// A rank that passes a key over holds the others up: they are told early, by rank and key, and so
// is that rank, whose parameters would silently be old.
#include "worker/progress/stalls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "tests/worker/box.h"

namespace phub::testing {
namespace stalls_test {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

JobSpec spec_of(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "w1", .elements = 100}, {.name = "w2", .elements = 100}};
  spec.world_size = 2;
  spec.lease_ms = 30'000;
  spec.progress_limit_ms = 20'000;  // asked after 2 s
  return spec;
}

TEST(Stalls, AKeyThatOneRankPassesOverIsNamedToAllAndCanStillBePushed) {
  Box box;
  std::string told;
  std::atomic<bool> was_told = false;
  ::testing::internal::CaptureStderr();
  each_worker(box, spec_of("passed"), [&](Worker& worker, uint32_t rank) {
    worker.push(0);
    if (rank == 0) {
      worker.push(1);
      EXPECT_THAT(worker.waits_for(), IsEmpty());
      std::thread watcher([&] {
        for (int i = 0; i < 4000 && told.empty(); ++i) {
          std::this_thread::sleep_for(milliseconds(5));
          told = worker.waits_for();
        }
        was_told = true;
      });
      worker.wait_all();
      watcher.join();
    } else {
      worker.wait(0);
      worker.wait(1);  // was not pushed: the present ones, and nobody knows better yet
      EXPECT_EQ(worker.round(1), worker.first_round() - 1);
      worker.push(0);
      for (const size_t waited : {0, 1}) {
        try {
          worker.wait(waited);
          ADD_FAILURE() << "key " << waited;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalid);
          EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1 has not sent key 'w2' of round 1"),
                                          HasSubstr("push_null()")));
        }
      }
      while (!was_told) std::this_thread::sleep_for(milliseconds(5));
      worker.push(1);  // the worker goes on
      worker.wait(1);
      EXPECT_EQ(worker.round(1), worker.first_round());
    }
    if (rank == 0) worker.push(0);
    worker.wait(0);
    EXPECT_EQ(worker.round(0), worker.first_round() + 1);
    worker.barrier();
  });
  EXPECT_THAT(told, HasSubstr("rank 1 has not sent key 'w2' of round 1"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 0: rank 1 has not sent key 'w2' of round 1, which others have"));
  for (const LogRecord& record : box.log("passed")) {
    EXPECT_NE(record.kind, LogRecord::Kind::kLost) << record.reason;
  }
}

// Keys may be at different rounds, and a rank may be slow: that is no error of its waits.
TEST(Stalls, ARankThatIsSlowIsNamedToTheOthersAndNotRefused) {
  Box box;
  std::string told;
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec_of("slow"), rank);
    if (rank == 0) options.wait_timeout_ms = 6'000;
    Worker worker(options);
    worker.wait_all();
    for (int i = 0; i < 3; ++i) worker.push_pull(0);
    worker.wait(1);
    if (rank == 0) {
      worker.push(1);
      try {
        worker.wait(1);
        ADD_FAILURE() << "nobody pushed it";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
        told = error.what();
      }
      worker.barrier();
    } else {
      worker.wait(1);
      worker.barrier();
      worker.wait(1);  // others have waited, and this rank does not wait for them
      worker.push(1);
    }
    worker.wait(1);
    worker.barrier();
  });
  EXPECT_THAT(told, HasSubstr("rank 1 has not sent key 'w2' of round 1"));
}

TEST(Stalls, AreThoseThatLastLongEnough) {
  JobStatus status;
  status.ranks = {
      {.rank = 0, .waited_s = 9, .waited_chunks = 0},
      {.rank = 1, .waited_s = 1, .waited_chunks = 2, .waited_round = 3, .waited_key = "short"},
      {.rank = 2, .waited_s = 5, .waited_chunks = 4, .waited_round = 3, .waited_key = "w"}};
  const std::vector<Stall> stalls = stalls_of(status, 2);
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0], (Stall{.rank = 2, .key = "w", .round = 3, .chunks = 4, .seconds = 5}));
  EXPECT_EQ(describe(stalls[0]), "rank 2 has not sent key 'w' of round 3");
  EXPECT_EQ(describe({.rank = 0}), "rank 0 has not sent the initial parameters");
}

}  // namespace stalls_test
}  // namespace phub::testing
