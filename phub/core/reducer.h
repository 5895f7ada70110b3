// Makes a chunk's result from its slots: the sum in the order of the job, then the optimizer, in
// one pass over memory. Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/trust.h"
#include "phub/core/chunk_table.h"
#include "phub/core/hyper.h"
#include "phub/core/job_parameters.h"
#include "phub/core/key_steps.h"
#include "phub/core/places.h"
#include "phub/core/reports.h"
#include "phub/core/trace.h"
#include "phub/core/tree_sum.h"

namespace phub {

struct ChunkSquares;

// A chunk's sum that something else has made: `codes` times 2^exponent.
struct MadeSum {
  std::span<const int32_t> codes;
  int exponent = 0;
};

class Reducer {
 public:
  Reducer(const JobParameters& parameters, const JobArrays& arrays, const Places& places,
          const HyperView& hyper, ChunkTable& table, Reports& reports, const CoreTrace& trace);
  static constexpr uint64_t bytes(uint64_t max_ranks, uint64_t classes, uint64_t largest_chunk,
                                  uint64_t levels, bool differences, bool lazy, bool weighs) {
    return max_ranks * (sizeof(void*) + sizeof(uint32_t) + (weighs ? sizeof(float) : 0)) +
           classes * sizeof(CachedStep) + (differences ? 2 : 1) * largest_chunk * sizeof(float) +
           (lazy ? bit_words(largest_chunk) * sizeof(uint64_t) : 0) +
           TreeSum::bytes(levels, largest_chunk, weighs);  // held
  }

  // From here on takes this in place of the slots; null: takes the slots.
  void take_sum(const MadeSum* sum) { made_ = sum; }

  // Sums the contributions that have arrived, and writes the round's result. False: it cannot be
  // done now, because reports are waiting to be read or the job has stopped. `store` is how the
  // optimizer stores.
  bool reduce(uint32_t index, kernels::Store store);

  // The two halves of reduce() in a gated job. The sum goes to the job's arena; its squares are
  // added up, and those that a trust ratio needs. False: as above.
  bool sum_for_gate(uint32_t index, ChunkSquares& squares);
  // Applies the sum times `factor`, and writes the round's result. `norms`: those of the chunk's
  // key, for its trust ratio.
  void apply(uint32_t index, float factor, const kernels::KeyNorms& norms, kernels::Store store);
  // Applies the chunk's part of a step of its whole key, likewise.
  void apply(uint32_t index, const KeySteps::Part& part);
  // Below a parent: writes the plain sum of so many ranks' gradients; null means that no rank sent
  // one. A NaN or Inf goes up to the parent, where it stops the job; a report names its rank here.
  // Returns nullopt where reduce() returns false.
  struct PartialSum {
    uint32_t participants = 0;  // or kNoneLeft
    bool null = false;
  };
  std::optional<PartialSum> sum_for_parent(uint32_t index, float* to);
  // The two halves of reduce() in a job with a standby. The gradient, divided as it is to be, goes
  // to `to`; `null`: no step is made. False: as above.
  bool sum_aside(uint32_t index, float* to, bool& null);
  void apply(uint32_t index, const float* gradient, kernels::Store store);
  // Writes the parameters, or their difference from the view, as the round's result.
  void publish(uint32_t index);
  uint64_t slack(uint64_t round) const { return hyper_.slack(round); }
  const KeySteps::Settings& settings() const { return hyper_; }
  double max_norm(uint64_t round) const { return hyper_.of(round, 0).max_norm; }

  // Applies one rank's contribution of `round` alone to the chunk at `place` (branch_orders.h): a
  // step of the optimizer, or plain addition. `steps` counts the optimizer's steps on the chunk
  // there. False: as above.
  bool update(uint32_t rank, uint32_t index, uint64_t round, uint32_t place, uint64_t& steps);
  // Copies the parameters at `place` into the results of one rank.
  void copy_result(uint32_t rank, const CoreChunk& chunk, uint32_t place);

  // Stores a part of the initial parameters, which lies at the beginning of rank 0's slot.
  void store_initial(const CoreChunk& chunk, uint32_t part);

  const float* initial_of(const CoreChunk& chunk) const { return parameters_at(chunk); }

  // A NaN under the policy `stop`: nothing completes any more.
  bool stopped() const { return stopped_; }

  // The arrays behind `hyper` live until the next call.
  void set_hyper(const HyperView& hyper);

 private:
  struct CachedStep {
    uint64_t round = kNever;
    int64_t step_offset = 0;
    kernels::Step step;
    double grad_scale = 1;
  };
  const CachedStep& step_of(const CoreChunk& chunk);
  float factor_of(uint32_t index, uint32_t participants);
  void gather(uint32_t index);
  bool sum(uint32_t index, float* to);
  bool add_up(uint32_t index, float factor, float* to);
  void leave_out(uint32_t index);
  void publish_to(void* result, const CoreChunk& chunk) const;  // null: nowhere
  void* separate_result(const CoreChunk& chunk) const;
  void make_difference(const CoreChunk& chunk);
  // A rank is left out by the box that has its gradient; from a rack only a sum comes.
  bool excludes() const {
    return parameters_.rules.on_nonfinite == OnNonFinite::kExclude &&
           parameters_.rack_ranks.empty();
  }
  std::optional<uint32_t> stopping_rack(uint32_t index) const;
  void stop(uint32_t rank, uint32_t index);
  void exclude(int at, uint32_t index);
  bool resolve_nonfinite(uint32_t index, float* sum);
  void optimize(const kernels::Step& step, const CoreChunk& chunk, uint32_t place, const float* sum,
                void* out, kernels::Store store);
  bool optimize_rows(const kernels::Step& step, const CoreChunk& chunk, uint32_t place,
                     std::span<const void* const> slots, const float* sum);
  float* parameters_at(const CoreChunk& chunk) const {
    return places_.running(Places::kParameters, chunk);
  }
  std::byte* result_of(uint64_t element) const {
    return arrays_.results + kernels::slot_bytes(parameters_.rules.parameter_dtype, element);
  }

  const JobParameters& parameters_;
  const JobArrays arrays_;
  const Places& places_;
  ChunkTable& table_;
  Reports& reports_;
  const CoreTrace& trace_;
  HyperView hyper_;
  std::vector<CachedStep> steps_;   // per key class
  std::vector<const void*> slots_;  // the slots of the chunk being summed, in rank order
  std::vector<uint32_t> slot_ranks_;
  std::vector<float> slot_weights_;  // empty: there are no weights
  std::vector<float> scratch_;
  const ResultFormat result_format_;
  std::vector<float> decoded_;     // a difference's
  std::vector<uint64_t> stepped_;  // rows of a lazy chunk; a bit each
  TreeSum tree_sum_;
  const MadeSum* made_ = nullptr;
  bool stopped_ = false;
  bool nonfinite_reported_ = false;  // below a parent
};

}  // namespace phub
