// The network for videos: that its videos say what they should, and its gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/geeps/examples_reference.h"
#include "worker/examples/geeps/video_data.h"

namespace phub::examples {
namespace examples_video_test {

constexpr size_t kSide = Videos::kSide;

// The pixels of a clip's frame that belong to the shape: the others are noise.
std::vector<bool> shape_of(const Clips& clips, size_t clip, size_t frame) {
  std::vector<bool> shape;
  for (const float pixel : clips.frame(frame).subspan(clip * Videos::kPixels, Videos::kPixels)) {
    EXPECT_TRUE((pixel >= 0 && pixel < 0.5f) || (pixel > 0.5f && pixel <= 1)) << pixel;
    shape.push_back(pixel > 0.5f);
  }
  return shape;
}
std::vector<bool> moved(const std::vector<bool>& shape, size_t right, size_t down) {
  std::vector<bool> moved(shape.size());
  for (size_t y = 0; y < kSide; ++y) {
    for (size_t x = 0; x < kSide; ++x) {
      moved[(y + down) % kSide * kSide + (x + right) % kSide] = shape[y * kSide + x];
    }
  }
  return moved;
}

TEST(Videos, ShapesMoveAsTheLabelSays) {
  constexpr size_t kClips = 100, kFrames = 9;
  const Clips clips = Videos(17, 1, kClips, kFrames).test();
  ASSERT_EQ(clips.size(), kClips);
  constexpr size_t kBack = kSide - 1;
  constexpr std::array<std::array<size_t, 2>, 4> kWays = {{{1, 0}, {kBack, 0}, {0, 1}, {0, kBack}}};
  for (size_t n = 0; n < kClips; ++n) {
    const auto [right, down] = kWays[static_cast<size_t>(clips.labels[n])];
    for (size_t f = 1; f < kFrames; ++f) {
      ASSERT_EQ(shape_of(clips, n, f), moved(shape_of(clips, n, f - 1), right, down))
          << "clip " << n << ", frame " << f;
    }
  }
}

// Wherever a pixel of the first frame is set, each class is as frequent as elsewhere.
TEST(Videos, OneFrameSaysNothing) {
  constexpr size_t kClips = 20000;
  const Clips clips = Videos(3, 1, kClips, 1).test();
  for (size_t pixel = 0; pixel < Videos::kPixels; ++pixel) {
    std::array<double, 4> frequency{};
    double all = 0;
    for (size_t n = 0; n < kClips; ++n) {
      if (clips.pixels[n * Videos::kPixels + pixel] < 0.5f) continue;
      ++frequency[static_cast<size_t>(clips.labels[n])];
      ++all;
    }
    // Six standard deviations.
    for (const double f : frequency) EXPECT_NEAR(f / all, 0.25, 6 * std::sqrt(0.1875 / all));
  }
}

TEST(Videos, HeldOutClipsAreNotTrainedWithAndShardsAreApart) {
  constexpr size_t kTrain = 12, kTest = 8, kWorld = 3;
  const Videos videos(5, kTrain, kTest, 2);
  std::vector<std::vector<float>> first_frames;  // of each rank's clips, and of those held out
  const auto collect = [&](const Clips& clips) {
    std::vector<std::vector<float>> found;
    for (size_t n = 0; n < clips.size(); ++n) {
      const auto frame = clips.frame(0).subspan(n * Videos::kPixels, Videos::kPixels);
      found.emplace_back(frame.begin(), frame.end());
    }
    std::ranges::sort(found);
    found.erase(std::unique(found.begin(), found.end()), found.end());
    first_frames.insert(first_frames.end(), found.begin(), found.end());
    return found.size();
  };
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    EXPECT_EQ(collect(videos.batch(1, rank, kWorld, 0, 400)), kTrain / kWorld);
  }
  EXPECT_EQ(collect(videos.test()), kTest);
  std::ranges::sort(first_frames);
  EXPECT_EQ(std::unique(first_frames.begin(), first_frames.end()) - first_frames.begin(),
            kTrain + kTest);
  EXPECT_EQ(videos.batch(1, 0, 1, 7, 5).pixels, videos.batch(1, 0, 1, 7, 5).pixels);
  EXPECT_NE(videos.batch(1, 0, 1, 7, 5).pixels, videos.batch(1, 0, 1, 8, 5).pixels);
}

// Through frames and time, against finite differences of the loss. The step is small, because of
// the kinks of many Relus.
TEST(VideoNetwork, GradientsAreThoseOfTheLoss) {
  const Clips clips = Videos(11, 1, 3, 4).test();
  ReferenceVideo network(2, 3);
  const auto gradients = network.gradients(clips, 1);
  for (size_t i = 0; i < gradients.size(); ++i) {
    double wrong = 0, norm = 0;
    for (size_t k = 0; k < gradients[i].size(); ++k) {
      float& parameter = network.parameters[i][k];
      const float at = parameter, upper = at + 2e-4f, lower = at - 2e-4f;
      parameter = upper;
      const double above = network.loss(clips);
      parameter = lower;
      const double below = network.loss(clips);
      parameter = at;
      const double slope = (above - below) / (upper - lower);
      wrong += std::pow(slope - gradients[i][k], 2);
      norm += std::pow(gradients[i][k], 2);
    }
    EXPECT_GT(norm, 0) << i;
    EXPECT_LT(std::sqrt(wrong / norm), 1e-2) << "parameters " << i;
  }
}

}  // namespace examples_video_test
}  // namespace phub::examples
