// The gate of a job whose rounds are applied as a whole (gated.h): the squares and the decision
// that its cores share. If the optimizer has trust ratios (kernels/trust.h), the decision also has
// the norms of each key, of which every core computes the ratios.
//
// Every core writes the squares of its chunks' gradients, and says when it has closed a round. The
// last one adds the squares in the order of the chunks, decides, and wakes the others. It is made
// with the job by the control thread; a core that has the job calls each function, unless it says
// otherwise.
//
// If other boxes have parts of the job, one box decides for all. There the control thread closes
// the round for each other box, with the squares that came from that box; so the sum has the order,
// and the bits, of one box. In the other boxes the last core only says that the round is closed:
// the control thread takes the squares, and gives the decision to the cores when it comes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/trust.h"
#include "phub/core/core_bells.h"
#include "phub/core/key_steps.h"
#include "phub/core/messages.h"
#include "transport/verdict.h"

namespace phub {

// A verdict as the cores carry it out: gradients are multiplied by the factor, unless it is
// skipped.
struct Decision : RoundVerdict {
  float factor = 1;
};

// The factor by which PyTorch's clip_grad_norm_ multiplies; max_norm 0 means no clipping.
float clip_factor(double max_norm, double norm);

// The squares of a chunk in a round; those of its key are zero unless there are trust ratios.
struct ChunkSquares {
  double gradient = 0;
  kernels::KeyNorms key;
};

// The part of other boxes in a gate.
struct GateShare {
  uint32_t others = 0;   // boxes that this one decides for
  bool is_told = false;  // another box decides
};

class RoundGate {
 public:
  // `skips`: rounds whose gradient is not finite. `keys`: by chunk, the key that it is of, key by
  // key; empty: there are no trust ratios. `steps`: of keys that are stepped as a whole; null:
  // there are none.
  RoundGate(uint32_t cores, uint32_t chunks, bool skips, GateShare share = {},
            std::vector<uint32_t> keys = {}, std::unique_ptr<KeySteps> steps = {});
  RoundGate(const RoundGate&) = delete;
  RoundGate& operator=(const RoundGate&) = delete;
  // `keys`: 0 if there are no trust ratios.
  static constexpr uint64_t bytes(uint64_t cores, uint64_t chunks, uint64_t keys) {
    return sizeof(RoundGate) + CoreBells::bytes(cores) + chunks * sizeof(ChunkSquares) +
           (keys > 0 ? chunks * sizeof(uint32_t) : 0) + keys * sizeof(kernels::KeyNorms);
  }

  KeySteps* key_steps() const { return steps_.get(); }
  // The chunk's gradient, in the round that is being closed. A chunk without one counts as 0.
  void set_squares(uint32_t chunk, const ChunkSquares& squares) { squares_[chunk] = squares; }
  // Some chunk of the round is closed, so it waits for all others.
  void begin(uint64_t round) { begun_.store(round, std::memory_order_relaxed); }
  bool has_begun(uint64_t round) const { return begun_.load(std::memory_order_relaxed) >= round; }

  // The core has closed all its chunks of the round; the last one decides. True: this box has
  // closed the round, and another one decides. `settings`: of key steps. REQUIRES: the core knows
  // the verdict on the round before.
  bool close(uint32_t core, uint64_t round, double max_norm,
             const KeySteps::Settings* settings = nullptr);
  bool has_decided(uint64_t round) const {
    return decided_.load(std::memory_order_acquire) >= round;
  }
  uint64_t last_decided() const { return decided_.load(std::memory_order_acquire); }
  // REQUIRES: has_decided(round), and the core has not closed the next one.
  const Decision& decision() const { return decision_; }
  // The norms of the keys in the decided round, over all chunks that make a step. REQUIRES:
  // likewise. Empty: there are no trust ratios.
  std::span<const kernels::KeyNorms> norms() const { return norms_; }
  kernels::KeyNorms norms_of(uint32_t chunk) const {
    return keys_.empty() ? kernels::KeyNorms() : norms_[keys_[chunk]];
  }

  // Control thread of the box that decides: another box has closed the round, with these squares of
  // its chunks, in their order. REQUIRES: once for each other box and round, after has_decided() of
  // the round before; numbers_per_chunk() squares of each chunk.
  void close_for(std::span<const uint32_t> chunks, std::span<const double> squares, uint64_t round);
  size_t numbers_per_chunk() const { return keys_.empty() ? 1 : 3; }
  bool decides_for_others() const { return share_.others > 0; }
  // Control thread of a box that is told the decision: take_squares() gets the squares of its
  // chunks, after close() was true; tell() gives the decision. REQUIRES: the box has closed that
  // round, and there are as many norms as the other box has.
  std::vector<double> take_squares(std::span<const uint32_t> chunks);
  void tell(const Decision& decision, std::span<const kernels::KeyNorms> norms = {});
  // Control thread: some chunk of the round is closed, here or at another box.
  uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }
  void begin_elsewhere(uint64_t round);

  // Before the core sleeps: the decision on the round will wake it. Returns false if the decision
  // is there already.
  bool arm(uint32_t core, uint64_t round);
  int wake_fd(uint32_t core) const { return bells_.fd(core); }

 private:
  bool close_one();
  void decide(uint64_t round, double max_norm);
  void wake(uint64_t round, uint32_t but_core);

  const uint32_t cores_;
  const bool skips_;
  const GateShare share_;
  const std::vector<uint32_t> keys_;      // by chunk of the job
  std::vector<ChunkSquares> squares_;     // likewise
  Decision decision_;                     // guarded by decided_
  std::vector<kernels::KeyNorms> norms_;  // by key; likewise
  const std::unique_ptr<KeySteps> steps_;
  CoreBells bells_;
  std::atomic<uint64_t> begun_{0};
  std::atomic<double> max_norm_{0};         // the round's, as a core has closed it
  alignas(64) std::atomic<uint32_t> open_;  // cores and other boxes that have not closed the round
  alignas(64) std::atomic<uint64_t> decided_{0};
};

}  // namespace phub
