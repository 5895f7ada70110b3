// The speed of an exchange that this machine's memory allows: the same mix of read and write
// streams, with as many threads as the server has cores, and nothing else done.
//
// The gradients and results lie in shared memfd mappings and the optimizer's state in anonymous
// memory, as in a server over shared memory. The gradients are written again before every timed
// pass, as workers do, so that the caches are in the same state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"

namespace phub {

// The memory traffic of one exchange.
struct MemoryMix {
  uint64_t elements = 0;
  uint32_t gradients = 1;       // arrays read, one per worker
  uint32_t gradient_bytes = 4;  // bytes of an element: 2 or 4
  uint32_t updates = 0;         // f32 arrays read and written: parameters and optimizer state
  uint32_t result_bytes = 0;    // bytes of an element of the array that is only written; 0: none
};

// The memory traffic of the server: parameters are updated in place when they come back as f32, and
// written once more otherwise; without optimizer the sum is written. REQUIRES: both formats are
// plain.
MemoryMix mix_of_exchange(uint64_t elements, uint32_t workers, kernels::Optimizer optimizer,
                          const kernels::Hyper& hyper, kernels::DType gradients,
                          kernels::DType results);

uint64_t bytes_moved(const MemoryMix& mix);  // read plus written

// Used by one thread, which runs others inside measure(). Above 2 GiB of arrays it measures a part
// and scales the time.
class Roofline {
 public:
  // Throws Error(kFull) when the memory is not there.
  Roofline(const MemoryMix& mix, uint32_t threads);
  ~Roofline();

  // Runs `passes` more timed passes with each kind of store.
  void measure(uint32_t passes);

  // The median time of one exchange's traffic over all passes so far, with the better kind of
  // store.
  double limit_us() const;
  double gigabytes_per_s() const;

 private:
  struct Arrays;
  double pass(bool streaming);

  MemoryMix mix_;
  uint32_t threads_;
  double scale_ = 1;  // whole model over the part that is measured
  std::unique_ptr<Arrays> arrays_;
  std::vector<double> cached_us_, streaming_us_;
};

}  // namespace phub
