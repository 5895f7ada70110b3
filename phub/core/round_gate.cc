#include "phub/core/round_gate.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {

float clip_factor(double max_norm, double norm) {
  if (max_norm <= 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : static_cast<float>(factor);  // of a NaN, NaN
}

RoundGate::RoundGate(uint32_t cores, uint32_t chunks, bool skips)
    : cores_(cores),
      skips_(skips),
      squares_(chunks),
      bells_(std::make_unique<Bell[]>(cores)),
      open_(cores) {
  for (uint32_t core = 0; core < cores; ++core) {
    bells_[core].fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (bells_[core].fd >= 0) continue;
    const int why = errno;
    while (core > 0) ::close(bells_[--core].fd);
    fail(ErrorCode::kFull, "no file descriptor left for {} cores ({}); raise ulimit -n", cores,
         std::strerror(why));
  }
}

RoundGate::~RoundGate() {
  for (uint32_t core = 0; core < cores_; ++core) ::close(bells_[core].fd);
}

void RoundGate::close(uint32_t core, uint64_t round, double max_norm) {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  decide(round, max_norm);
  open_.store(cores_, std::memory_order_relaxed);
  decided_.store(round, std::memory_order_seq_cst);
  for (uint32_t other = 0; other < cores_; ++other) {
    if (other == core || !bells_[other].armed.load(std::memory_order_seq_cst)) continue;
    bells_[other].armed.store(false, std::memory_order_relaxed);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(bells_[other].fd, &one, sizeof one);
  }
}

// The squares of finite gradients cannot overflow: the sum is finite exactly if they are.
void RoundGate::decide(uint64_t round, double max_norm) {
  double sum = 0;
  for (double& square : squares_) sum += std::exchange(square, 0);
  decision_.round = round;
  decision_.norm = std::sqrt(sum);
  decision_.skipped = skips_ && !std::isfinite(sum);
  decision_.factor = clip_factor(max_norm, decision_.norm);
}

bool RoundGate::arm(uint32_t core, uint64_t round) {
  bells_[core].armed.store(true, std::memory_order_seq_cst);
  return decided_.load(std::memory_order_seq_cst) < round;
}

}  // namespace phub
