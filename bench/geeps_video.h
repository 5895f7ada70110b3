// The network for videos (worker/examples/geeps/video.h) on the stated device: it makes its own
// calls, and nothing is computed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "bench/geeps_net.h"
#include "bench/geeps_run.h"
#include "worker/examples/geeps/device_math.h"
#include "worker/examples/geeps/video.h"

namespace phub::geeps_bench {

// Products take the time of their operations or of their memory traffic, as layers do
// (geeps_net.h); computations between them take that of their traffic, with the next product.
// Uploads take the time of a copy; downloads wait, and give zeros.
class TimedMath final : public examples::Math {
 public:
  // REQUIRES: the stream outlives this.
  TimedMath(Stream& compute, const Machine& machine) : compute_(compute), machine_(machine) {}

  void multiply(const examples::Product& product, const float* a, const float* b,
                float* c) override;
  void run(size_t rows, size_t columns, const examples::Operation& operation) override;
  void upload(const float* from, float* to, size_t count) override;
  void download(const float* from, float* to, size_t count) override;

  std::chrono::nanoseconds computed() const { return computed_; }  // without uploads

 private:
  void work(double seconds);

  Stream& compute_;
  const Machine& machine_;
  double pending_ = 0;  // seconds that go with the next product
  std::chrono::nanoseconds computed_{0};
};

struct VideoShape {
  size_t filters = 64, hidden = 16;
  uint32_t samples = 64;
};

// Videos of so many frames, and their network.
class VideoTraining {
 public:
  VideoTraining(const VideoShape& shape, size_t frames, const Machine& machine);

  Iteration iteration();  // REQUIRES: this outlives it

  // The least memory with which nothing is moved, and whether it can be trained with so much.
  uint64_t least_unmoved_bytes();
  bool fits(uint64_t budget_bytes);

 private:
  const Machine machine_;
  const examples::Videos videos_;
  examples::VideoNetwork network_;
  std::chrono::nanoseconds computed_{0};  // in the latest iteration
};

}  // namespace phub::geeps_bench
