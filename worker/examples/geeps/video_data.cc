#include "worker/examples/geeps/video_data.h"

#include <array>
#include <numeric>

#include "transport/error.h"
#include "worker/examples/digits_data.h"

namespace phub::examples {
namespace {

using digits::Random;

constexpr size_t kSide = Videos::kSide, kShapeSide = 3;
constexpr float kNoise = 0.2f;

// One clip, of which each frame is written in turn.
class Motion {
 public:
  explicit Motion(uint64_t seed) : random_(seed) {
    label_ = static_cast<int>(random_.next() % Videos::kClasses);
    x_ = random_.next() % kSide;
    y_ = random_.next() % kSide;
    for (float& pixel : shape_) pixel = random_.uniform() < 0.5f ? 0.0f : 1.0f;
    shape_[kShapeSide * kShapeSide / 2] = 1;  // it is not empty
  }

  int label() const { return label_; }
  void draw(std::span<float> pixels) {
    for (float& pixel : pixels) pixel = kNoise * random_.uniform();
    for (size_t i = 0; i < shape_.size(); ++i) {
      const size_t y = (y_ + i / kShapeSide) % kSide, x = (x_ + i % kShapeSide) % kSide;
      if (shape_[i] > 0) pixels[y * kSide + x] = 1 - kNoise * random_.uniform();
    }
    constexpr std::array<size_t, Videos::kClasses> kX = {1, kSide - 1, 0, 0},
                                                   kY = {0, 0, 1, kSide - 1};
    x_ = (x_ + kX[static_cast<size_t>(label_)]) % kSide;
    y_ = (y_ + kY[static_cast<size_t>(label_)]) % kSide;
  }

 private:
  Random random_;
  int label_ = 0;
  size_t x_ = 0, y_ = 0;
  std::array<float, kShapeSide * kShapeSide> shape_{};
};

}  // namespace

std::span<const float> Clips::frame(size_t frame) const {
  const size_t floats = size() * Videos::kPixels;
  return std::span(pixels).subspan(frame * floats, floats);
}

Videos::Videos(uint64_t seed, size_t train, size_t test, size_t frames)
    : seed_(Random(seed).next()), train_(train), test_(test), frames_(frames) {
  if (train == 0 || test == 0 || frames == 0) {
    fail(ErrorCode::kInvalid, "{} clips to train with and {} held out, of {} frames: none may be 0",
         train, test, frames);
  }
}

Clips Videos::test() const {
  std::vector<uint64_t> numbers(test_);
  std::iota(numbers.begin(), numbers.end(), train_);
  return clips(numbers);
}

Clips Videos::batch(uint64_t seed, uint32_t rank, uint32_t world, uint64_t round,
                    size_t size) const {
  const size_t own = (train_ - rank + world - 1) / world;
  Random random(Random(Random(seed).next() + rank).next() + round);
  std::vector<uint64_t> numbers(size);
  for (uint64_t& number : numbers) number = rank + random.next() % own * world;
  return clips(numbers);
}

Clips Videos::clips(std::span<const uint64_t> numbers) const {
  Clips clips{.frames = frames_,
              .pixels = std::vector<float>(frames_ * numbers.size() * kPixels),
              .labels = {}};
  for (size_t n = 0; n < numbers.size(); ++n) {
    Motion motion(Random(seed_ + numbers[n]).next());
    clips.labels.push_back(motion.label());
    for (size_t f = 0; f < frames_; ++f) {
      motion.draw(std::span(clips.pixels).subspan((f * numbers.size() + n) * kPixels, kPixels));
    }
  }
  return clips;
}

}  // namespace phub::examples
