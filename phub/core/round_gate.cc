#include "phub/core/round_gate.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace phub {

float clip_factor(double max_norm, double norm) {
  if (max_norm <= 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : static_cast<float>(factor);  // a NaN gives a NaN
}

RoundGate::RoundGate(uint32_t cores, uint32_t chunks, bool skips, GateShare share,
                     std::vector<uint32_t> keys, std::unique_ptr<KeySteps> steps)
    : cores_(cores),
      skips_(skips),
      share_(share),
      keys_(std::move(keys)),
      squares_(chunks),
      norms_(keys_.empty() ? 0 : keys_.back() + 1),
      steps_(std::move(steps)),
      bells_(cores),
      open_(cores + share.others) {}

// Returns whether it was the last. Then the next round is open, although no core closes that before
// this one is decided.
bool RoundGate::close_one() {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
  open_.store(cores_ + share_.others, std::memory_order_relaxed);
  return true;
}

bool RoundGate::close(uint32_t core, uint64_t round, double max_norm,
                      const KeySteps::Settings* settings) {
  max_norm_.store(max_norm, std::memory_order_relaxed);
  if (!close_one()) return false;
  if (share_.is_told) return true;
  if (steps_) steps_->complete(core, round, *settings);
  decide(round, max_norm);
  wake(round, core);
  return false;
}

void RoundGate::close_for(std::span<const uint32_t> chunks, std::span<const double> squares,
                          uint64_t round) {
  const size_t each = numbers_per_chunk();
  for (size_t i = 0; i < chunks.size(); ++i) {
    const double* const of_chunk = &squares[i * each];
    squares_[chunks[i]].gradient = of_chunk[0];
    if (each > 1) squares_[chunks[i]].key = {of_chunk[1], of_chunk[2]};
  }
  if (!close_one()) return;
  decide(round, max_norm_.load(std::memory_order_relaxed));
  wake(round, CoreBells::kNoCore);
}

std::vector<double> RoundGate::take_squares(std::span<const uint32_t> chunks) {
  std::vector<double> squares;
  squares.reserve(chunks.size() * numbers_per_chunk());
  for (const uint32_t chunk : chunks) {
    const ChunkSquares taken = std::exchange(squares_[chunk], {});
    squares.push_back(taken.gradient);
    if (!keys_.empty()) squares.insert(squares.end(), {taken.key.parameters, taken.key.update});
  }
  return squares;
}

void RoundGate::tell(const Decision& decision, std::span<const kernels::KeyNorms> norms) {
  decision_ = decision;
  std::ranges::copy(norms, norms_.begin());
  wake(decision.round, CoreBells::kNoCore);
}

void RoundGate::begin_elsewhere(uint64_t round) {
  uint64_t before = begun_.load(std::memory_order_relaxed);
  while (before < round && !begun_.compare_exchange_weak(before, round)) {
  }
}

void RoundGate::wake(uint64_t round, uint32_t but_core) {
  decided_.store(round, std::memory_order_seq_cst);
  bells_.ring(but_core);
}

// The squares of finite gradients cannot overflow: the sum is finite exactly if they are.
void RoundGate::decide(uint64_t round, double max_norm) {
  double sum = 0;
  std::ranges::fill(norms_, kernels::KeyNorms());
  for (size_t chunk = 0; chunk < squares_.size(); ++chunk) {
    const ChunkSquares squares = std::exchange(squares_[chunk], {});
    sum += squares.gradient;
    if (keys_.empty()) continue;
    norms_[keys_[chunk]].parameters += squares.key.parameters;
    norms_[keys_[chunk]].update += squares.key.update;
  }
  for (kernels::KeyNorms& norms : norms_) {
    norms = {std::sqrt(norms.parameters), std::sqrt(norms.update)};
  }
  decision_.round = round;
  decision_.norm = std::sqrt(sum);
  decision_.skipped = skips_ && !std::isfinite(sum);
  decision_.factor = clip_factor(max_norm, decision_.norm);
}

bool RoundGate::arm(uint32_t core, uint64_t round) {
  bells_.arm(core);
  return decided_.load(std::memory_order_seq_cst) < round;
}

}  // namespace phub
