#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <thread>
#include <vector>

#include "bench/zerocompute/shared.h"
#include "worker/examples/processes.h"

namespace phub {
namespace zerocompute_shared_test {

// Processes that write their turn, meet, and look at everyone's: none may be ahead or behind.
TEST(SharedCaseTest, BarrierKeepsProcessesTogether) {
  constexpr uint32_t kWorkers = 4;
  constexpr int kTurns = 2000;
  for (int64_t spin_ns : {0, 5000}) {
    SharedCase shared(kWorkers, 0, spin_ns);
    std::vector<Child> children;
    children.reserve(kWorkers);
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      const auto body = [&shared, rank] {
        for (int turn = 1; turn <= kTurns; ++turn) {
          shared.slots()[rank].start_ns = turn;
          if (!shared.head().workers.wait()) return 2;
          for (const WorkerSlot& slot : shared.slots()) {
            if (slot.start_ns != turn) return 3;
          }
          if (!shared.head().workers.wait()) return 2;
        }
        return 0;
      };
      children.emplace_back(body, SIGKILL);
    }
    for (Child& child : children) {
      ASSERT_TRUE(child.wait(60000));
      EXPECT_EQ(*child.ended(), "");
    }
  }
}

TEST(SharedCaseTest, AbortReleasesTheWaiting) {
  SharedCase shared(2, 0, 0);
  Child waiting([&] { return shared.head().workers.wait() ? 1 : 0; }, SIGKILL);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(waiting.ended());
  shared.head().workers.abort();
  ASSERT_TRUE(waiting.wait(10000));
  EXPECT_EQ(*waiting.ended(), "");
  EXPECT_FALSE(shared.head().workers.wait());
}

TEST(SharedCaseTest, ReferenceIsZeroedAndShared) {
  SharedCase shared(1, 10000, 0);
  ASSERT_EQ(shared.reference().size(), 10000u);
  Child child(
      [&] {
        shared.reference()[9999] = std::byte{7};
        return 0;
      },
      SIGKILL);
  ASSERT_TRUE(child.wait(10000));
  EXPECT_EQ(shared.reference()[0], std::byte{0});
  EXPECT_EQ(shared.reference()[9999], std::byte{7});
}

TEST(SharedCaseTest, TextIsCutToItsField) {
  char field[4] = {};
  set_text(field, "abcdef");
  EXPECT_STREQ(field, "abc");
}

TEST(ChildTest, SaysHowItEnded) {
  Child failed([] { return 3; }, SIGKILL);
  ASSERT_TRUE(failed.wait(10000));
  EXPECT_EQ(*failed.ended(), "exit status 3");
  Child killed(
      [] {
        pause();
        return 0;
      },
      SIGKILL);
  EXPECT_FALSE(killed.wait(10));
  killed.send(SIGKILL);
  ASSERT_TRUE(killed.wait(10000));
  EXPECT_TRUE(killed.ended()->starts_with("killed by signal 9"));
}

// How a process ended whose parent is gone; nothing if it still runs after 10 s.
std::optional<int> status_of_orphan(pid_t orphan) {
  for (int i = 0; i < 1000; ++i) {
    int status = 0;
    if (waitpid(orphan, &status, WNOHANG) == orphan) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(orphan, SIGKILL);
  waitpid(orphan, nullptr, 0);
  return std::nullopt;
}

// A parent that is killed takes its children along.
TEST(ChildTest, DoesNotOutliveItsParent) {
  ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // who loses its parent becomes a child of ours
  SharedCase shared(1, 0, 0);
  Child parent(
      [&] {
        Child child(
            [&] {
              shared.slots()[0].start_ns = getpid();
              shared.head().orders.raise();
              pause();
              return 0;
            },
            SIGKILL);
        child.wait(-1);
        return 0;
      },
      SIGKILL);
  shared.head().orders.wait(0, 0);
  const auto child = static_cast<pid_t>(shared.slots()[0].start_ns);
  EXPECT_EQ(kill(child, 0), 0);
  parent.send(SIGKILL);
  ASSERT_TRUE(parent.wait(10000));
  const std::optional<int> status = status_of_orphan(child);
  ASSERT_TRUE(status) << "it still runs";
  EXPECT_TRUE(WIFSIGNALED(*status));
  EXPECT_EQ(WTERMSIG(*status), SIGKILL);
}

}  // namespace zerocompute_shared_test
}  // namespace phub
