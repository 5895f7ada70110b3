// The pool of staging memory.
#include "worker/geeps/staged_buffers.h"

#include <gtest/gtest.h>

#include <utility>

#include "worker/device/host_device.h"

namespace phub::geeps {
namespace staged_buffers_test {

constexpr size_t kSmall = 4096, kLarge = 16 * kSmall;

TEST(StagingPool, ASmallBufferLeavesTheLargePieceToALargeOne) {
  const auto device = make_host_device({.budget_bytes = 4096});
  StagingPool pool(*device);
  {
    HostMemory large = pool.take(kLarge), small = pool.take(kSmall);
    pool.give(std::move(large));
    pool.give(std::move(small));
  }
  for (int round = 0; round < 3; ++round) {
    HostMemory small = pool.take(kSmall), large = pool.take(kLarge);
    EXPECT_EQ(small.bytes(), kSmall);
    EXPECT_EQ(large.bytes(), kLarge);
    EXPECT_EQ(device->stats().host_bytes, kSmall + kLarge);
    pool.give(std::move(large));
    pool.give(std::move(small));
  }
}

TEST(StagingPool, HasAsManyPiecesAsWereTakenAtOneTime) {
  const auto device = make_host_device({.budget_bytes = 4096});
  StagingPool pool(*device);
  pool.give(pool.take(kSmall));
  pool.give(pool.take(kLarge));  // in place of the small piece
  EXPECT_EQ(device->stats().host_bytes, kLarge);
  pool.give(pool.take(kSmall));  // the large piece
  EXPECT_EQ(device->stats().host_bytes, kLarge);
}

}  // namespace staged_buffers_test
}  // namespace phub::geeps
