// Generated videos: a small random shape moves over a noisy picture, whose edges are joined, by a
// pixel per frame. The direction is the class. A shape starts anywhere, so that one frame, or the
// frames out of order, say nothing about the class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phub::examples {

struct Clips {
  size_t frames = 0;
  std::vector<float> pixels;  // frames × clips × 8 × 8, 0 to 1
  std::vector<int> labels;    // 0 right, 1 left, 2 down, 3 up

  size_t size() const { return labels.size(); }
  std::span<const float> frame(size_t frame) const;  // one frame of all clips
};

class Videos {
 public:
  static constexpr size_t kSide = 8, kPixels = kSide * kSide, kClasses = 4;

  // All clips follow from the seed; their beginnings do not depend on the number of frames.
  Videos(uint64_t seed, size_t train, size_t test, size_t frames);

  size_t frames() const { return frames_; }
  Clips test() const;  // held out
  // The mini-batch of one rank in one round, as digits::batch() draws it. REQUIRES: rank < world <=
  // the number of clips to train with.
  Clips batch(uint64_t seed, uint32_t rank, uint32_t world, uint64_t round, size_t size) const;

 private:
  Clips clips(std::span<const uint64_t> numbers) const;

  uint64_t seed_;
  size_t train_, test_, frames_;
};

}  // namespace phub::examples
