#include "bench/geeps_video.h"

#include <algorithm>
#include <cmath>

#include "transport/error.h"
#include "worker/examples/geeps/devices.h"

namespace phub::geeps_bench {
namespace {

constexpr size_t kClips = 1000;

double bytes_of(size_t floats) { return static_cast<double>(floats) * sizeof(float); }

examples::Share share_of(const VideoShape& shape) { return {.samples = shape.samples}; }

}  // namespace

void TimedMath::work(double seconds) {
  const std::chrono::nanoseconds time(std::llround((pending_ + seconds) * 1e9));
  pending_ = 0;
  computed_ += time;
  compute_.work_for(time);
}

void TimedMath::multiply(const examples::Product& p, const float* /*a*/, const float* /*b*/,
                         float* /*c*/) {
  const double operations = 2.0 * static_cast<double>(p.rows * p.columns * p.depth);
  const double moved = bytes_of(p.rows * p.depth + p.depth * p.columns + p.rows * p.columns);
  work(std::max(operations / machine_.flops_per_second, moved / machine_.memory_bytes_per_second));
}

void TimedMath::run(size_t rows, size_t columns, const examples::Operation& /*operation*/) {
  pending_ += 2 * bytes_of(rows * columns) / machine_.memory_bytes_per_second;
}

void TimedMath::upload(const float* /*from*/, float* /*to*/, size_t count) {
  const std::chrono::duration<double> time =
      machine_.copy_latency +
      std::chrono::duration<double>(bytes_of(count) / machine_.copy_bytes_per_second);
  compute_.work_for(std::chrono::duration_cast<std::chrono::nanoseconds>(time));
}

void TimedMath::download(const float* /*from*/, float* to, size_t count) {
  compute_.synchronize();
  std::fill_n(to, count, 0.0F);
}

VideoTraining::VideoTraining(const VideoShape& shape, size_t frames, const Machine& machine)
    : machine_(machine),
      videos_(1, kClips, 1, frames),
      network_(videos_, shape.filters, shape.hidden, share_of(shape)) {}

Iteration VideoTraining::iteration() {
  return {.tables = network_.tables().specs(),
          .run =
              [this](geeps::Cache& cache, Stream* compute) {
                if (compute == nullptr) {
                  network_.train(cache, nullptr, 0);
                  return;
                }
                TimedMath math(*compute, machine_);
                network_.train(cache, &math, 0);
                computed_ = math.computed();
              },
          .compute_time = [this] { return computed_; }};
}

uint64_t VideoTraining::least_unmoved_bytes() {
  const uint64_t plenty = 2 * data_bytes(network_.tables().specs()) + (uint64_t{64} << 20);
  return examples::plan(network_, {.budget_bytes = plenty, .reserved_bytes = 1, .max_lead = 1},
                        "virtual")
      .total_bytes();
}

bool VideoTraining::fits(uint64_t budget_bytes) {
  try {
    examples::plan(network_, {.budget_bytes = budget_bytes, .reserved_bytes = 1, .max_lead = 1},
                   "virtual");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return false;
  }
  return true;
}

}  // namespace phub::geeps_bench
