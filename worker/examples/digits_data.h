// The UCI handwritten digits: 1,797 grey images of 8×8 pixels and the digit that each one shows.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <string>
#include <vector>

namespace phub::digits {

inline constexpr int kPixels = 64;
inline constexpr int kClasses = 10;

struct Samples {
  Eigen::MatrixXf images;   // kPixels × samples, 0 (white) to 1 (black)
  std::vector<int> labels;  // 0 … 9

  size_t size() const { return labels.size(); }
};

struct Dataset {
  Samples train;
  Samples test;  // held out: every sixth image
};

// Reads lines of 64 pixels (0 to 16) and a label, separated by commas. Throws Error(kNotFound,
// kInvalid) that names file, line and field.
Dataset load(const std::string& csv_path);

// The mini-batch of one rank in one round. It depends on nothing but the arguments, so that a
// reference can recompute it: `size` images drawn with replacement from the rank's shard, which is
// every `world`-th training image from `rank` on. REQUIRES: rank < world <= train.size().
Samples batch(const Samples& train, uint64_t seed, uint32_t rank, uint32_t world, uint64_t round,
              size_t size);

// A sequence of random numbers that is the same everywhere: SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  float uniform();  // in [0, 1)

 private:
  uint64_t state_;
};

}  // namespace phub::digits
