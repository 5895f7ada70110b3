// The network for videos as geeps_bench trains it: its time, and the memory that it needs.
#include "bench/geeps_video.h"

#include <gtest/gtest.h>

#include <array>

#include "worker/device/host_device.h"

namespace phub::geeps_bench {
namespace geeps_video_test {

constexpr VideoShape kShape{.filters = 4, .hidden = 8, .samples = 2};

TEST(TimedMath, TakesWhatOperationsAndTrafficDo) {
  const auto device = make_host_device({.budget_bytes = 4096});
  const auto compute = device->make_stream("compute");
  const Machine machine{.flops_per_second = 1e9, .memory_bytes_per_second = 1e9};
  TimedMath math(*compute, machine);
  // 2 · 100 · 20 · 30 operations, and fewer bytes.
  math.multiply({.rows = 100, .columns = 20, .depth = 30}, nullptr, nullptr, nullptr);
  EXPECT_EQ(math.computed().count(), 120'000);
  // 4 · (1000 + 1000 + 1) bytes, and fewer operations.
  math.multiply({.rows = 1, .columns = 1000, .depth = 1}, nullptr, nullptr, nullptr);
  EXPECT_EQ(math.computed().count(), 120'000 + 4 * 2001);
  math.run(50, 10, examples::Fill{0, nullptr});
  EXPECT_EQ(math.computed().count(), 120'000 + 4 * 2001);
  math.multiply({.rows = 100, .columns = 20, .depth = 30}, nullptr, nullptr, nullptr);
  EXPECT_EQ(math.computed().count(), 2 * 120'000 + 4 * 2001 + 8 * 500);
  std::array<float, 2> there = {7, 7};
  math.download(nullptr, there.data(), 1);
  EXPECT_EQ(there, (std::array<float, 2>{0, 7}));
}

// Of every frame: pixels, the outputs of two convolutions, the gates, and the state.
TEST(VideoTraining, EveryFrameNeedsItsLocalRows) {
  const auto bytes = [](size_t frames) {
    return VideoTraining(kShape, frames, {}).least_unmoved_bytes();
  };
  const auto rows = [](size_t floats) { return (floats + 127) / 128 * 512; };
  const uint64_t of_a_frame =
      rows(64 * 2) + rows(64 * 4 * 2) + rows(16 * 8 * 2) + rows(4 * 8 * 2) + rows(2 * 8 * 2);
  EXPECT_EQ(bytes(12) - bytes(4), 8 * of_a_frame);
}

TEST(VideoTraining, ALongVideoFitsWhereAShortOneIsKept) {
  VideoTraining kept(kShape, 8, {}), swapped(kShape, 32, {});
  const uint64_t budget = kept.least_unmoved_bytes();
  EXPECT_TRUE(kept.fits(budget));
  EXPECT_TRUE(swapped.fits(budget));
  EXPECT_FALSE(swapped.fits(budget / 8));
  for (VideoTraining* training : {&kept, &swapped}) {
    TrainingRun run(training->iteration(), {}, budget);
    const double seconds = run.seconds_per_iteration(1);
    run.cache().wait_all();
    EXPECT_EQ(run.cache().placement().moved_bytes == 0, training == &kept);
    EXPECT_EQ(run.cache().stats().outside_sequence, 0u);
    EXPECT_GT(run.busy(seconds), 0);
    EXPECT_LE(run.busy(seconds), 1);
  }
}

}  // namespace geeps_video_test
}  // namespace phub::geeps_bench
