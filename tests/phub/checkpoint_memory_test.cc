// Every allocation fails once while a checkpoint is written, and while one is read. Nothing is
// lost, nothing stays behind, and nothing counts as damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>

#include "tests/phub/checkpoint_rig.h"

namespace {

thread_local uint64_t allocations_left = ~uint64_t{0};  // before the one that fails

void* allocate(size_t bytes) {
  if (allocations_left != ~uint64_t{0} && allocations_left-- == 0) {
    allocations_left = ~uint64_t{0};
    return nullptr;
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

void* operator new(size_t bytes) {
  void* memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace phub::testing {
namespace {

const Content kOld{.round = 10};
const Content kNew{.round = 20};

// A directory in memory: what is tested here is not the disk.
class CheckpointMemory : public ::testing::Test {
 protected:
  CheckpointMemory() {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    for (const Content& content : {kOld, kNew}) {
      for (const std::string file :
           {kParametersFile.data(), kMomentum.data(), kClocksFile.data()}) {
        for (size_t i = 0; i < content.tensors(file).size(); ++i) content.tensor(file, i);
      }
    }
  }
  ~CheckpointMemory() override { std::filesystem::remove_all(directory_); }

  // Whether it ended without the failure.
  template <class F>
  static bool with_failure(uint64_t allocation, F&& call) {
    allocations_left = allocation;
    bool failed = false;
    try {
      call();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    const bool fired = allocations_left == ~uint64_t{0};
    allocations_left = ~uint64_t{0};
    EXPECT_TRUE(fired || !failed);
    return !fired;
  }

  std::string directory_ = "/dev/shm/phub-checkpoint-XXXXXX";
};

TEST_F(CheckpointMemory, RunsOutWhileACheckpointIsWritten) {
  uint64_t tried = 0;
  for (bool to_the_end = false; !to_the_end; ++tried) {
    SCOPED_TRACE(tried);
    const std::string directory = directory_ + "/checkpoints";
    CheckpointStore store(directory, 1);
    write_checkpoint(store, kOld);
    bool durable = false;
    to_the_end = with_failure(tried, [&] {
      write_checkpoint(store, kNew);
      durable = true;
    });
    std::vector<Refusal> refused;
    {
      const auto reader = store.newest_whole(kJob, refused);
      ASSERT_NE(reader, nullptr);
      ASSERT_EQ(difference(*reader, durable ? kNew : kOld), "");
      ASSERT_TRUE(refused.empty());
    }
    ASSERT_TRUE(durable || write_checkpoint(store, kNew).empty());
    ASSERT_THAT(store.list(kJob), ::testing::Contains(kNew.id()));
    std::filesystem::remove_all(directory);
  }
  EXPECT_GT(tried, 200u);
}

TEST_F(CheckpointMemory, RunsOutWhileACheckpointIsRead) {
  CheckpointStore store(directory_, 2);
  write_checkpoint(store, kOld);
  write_checkpoint(store, kNew);
  uint64_t tried = 0;
  for (bool to_the_end = false; !to_the_end; ++tried) {
    SCOPED_TRACE(tried);
    std::vector<Refusal> refused;
    to_the_end = with_failure(tried, [&] {
      const auto reader = store.newest_whole(kJob, refused);
      ASSERT_EQ(reader->manifest().round, kNew.round);
      ASSERT_EQ(difference(*reader, kNew), "");
    });
    ASSERT_TRUE(refused.empty());
  }
  EXPECT_GT(tried, 200u);
}

}  // namespace
}  // namespace phub::testing
