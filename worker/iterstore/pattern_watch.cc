#include "worker/iterstore/pattern_watch.h"

#include <algorithm>
#include <utility>

namespace phub::iterstore {
namespace {

constexpr uint64_t kMostPatience = 1024;

}  // namespace

void PatternWatch::placed(uint32_t clocks) {
  clocks_of_iteration_ = std::max(clocks, 1u);
  clocks_ = 0;
  iteration_ = {};
  recording_.store(false, std::memory_order_relaxed);
  stopped_ = false;
}

void PatternWatch::stop() {
  recording_.store(false, std::memory_order_relaxed);
  stopped_ = true;
}

bool PatternWatch::after_clock(const Tally& before) {
  if (share_ == 0 || clocks_of_iteration_ == 0 || stopped_) return false;
  iteration_ = iteration_ + before;
  if (++clocks_ % clocks_of_iteration_ != 0) return false;
  const Tally iteration = std::exchange(iteration_, {});
  if (recording_.exchange(false, std::memory_order_relaxed)) return is_of_all(iteration);
  const bool whole = clocks_ > clocks_of_iteration_;
  if (whole && has_changed(iteration)) recording_.store(true, std::memory_order_relaxed);
  return false;
}

// If one is lost: placing rows needs all.
bool PatternWatch::is_of_all(const Tally& iteration) const {
  return iteration.ranks == ranks_ * clocks_of_iteration_;
}

// Recording again does not help if every iteration is another: it waits twice as long after each
// that did not.
bool PatternWatch::has_changed(const Tally& iteration) {
  if (!is_of_all(iteration)) return false;
  const auto from = share_ * static_cast<double>(iteration.accesses);
  if (iteration.outside == 0 || static_cast<double>(iteration.outside) < from) {
    patience_ = 1;
    return false;
  }
  if (clocks_ / clocks_of_iteration_ - 1 < patience_) return false;
  patience_ = std::min(2 * patience_, kMostPatience);
  return true;
}

}  // namespace phub::iterstore
