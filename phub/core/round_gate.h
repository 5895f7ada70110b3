// The gate of a job whose rounds are applied as a whole (gated.h): what its cores tell each other.
//
// Every core writes the squares of its chunks' gradients, and says when it has closed a round. The
// last one adds the squares in the order of the chunks, decides, and wakes the others. It is made
// with the job by the control thread; each function is for a core that has the job.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "phub/core/messages.h"
#include "transport/verdict.h"

namespace phub {

// A verdict as the cores carry it out: gradients are multiplied by the factor, unless it is
// skipped.
struct Decision : RoundVerdict {
  float factor = 1;
};

// What PyTorch's clip_grad_norm_ multiplies by. max_norm 0: no clipping.
float clip_factor(double max_norm, double norm);

class RoundGate {
 public:
  // `skips`: rounds whose gradient is not finite.
  RoundGate(uint32_t cores, uint32_t chunks, bool skips);
  ~RoundGate();
  RoundGate(const RoundGate&) = delete;
  RoundGate& operator=(const RoundGate&) = delete;
  static constexpr uint64_t bytes(uint64_t cores, uint64_t chunks) {
    return sizeof(RoundGate) + cores * sizeof(Bell) + chunks * sizeof(double);
  }

  // The chunk's gradient, in the round that is being closed. A chunk without one counts as 0.
  void set_square(uint32_t chunk, double square) { squares_[chunk] = square; }
  // Some chunk of the round is closed: all others are waited for.
  void begin(uint64_t round) { begun_.store(round, std::memory_order_relaxed); }
  bool has_begun(uint64_t round) const { return begun_.load(std::memory_order_relaxed) >= round; }

  // The core has closed all its chunks of the round; the last one decides. REQUIRES: it knows the
  // verdict on the round before.
  void close(uint32_t core, uint64_t round, double max_norm);
  bool has_decided(uint64_t round) const {
    return decided_.load(std::memory_order_acquire) >= round;
  }
  // REQUIRES: has_decided(round), and the core has not closed the next one.
  const Decision& decision() const { return decision_; }

  // Before the core sleeps: the decision on the round will wake it. False: it is there already.
  bool arm(uint32_t core, uint64_t round);
  int wake_fd(uint32_t core) const { return bells_[core].fd; }  // eventfd: edge triggered

 private:
  struct alignas(64) Bell {
    int fd = -1;
    std::atomic<bool> armed{false};
  };
  void decide(uint64_t round, double max_norm);

  const uint32_t cores_;
  const bool skips_;
  std::vector<double> squares_;    // by chunk of the job
  Decision decision_;              // guarded by decided_
  std::unique_ptr<Bell[]> bells_;  // by core of the job
  std::atomic<uint64_t> begun_{0};
  alignas(64) std::atomic<uint32_t> open_;  // cores that have not closed the round
  alignas(64) std::atomic<uint64_t> decided_{0};
};

}  // namespace phub
