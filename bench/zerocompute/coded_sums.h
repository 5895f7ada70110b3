// The sums of gradients in a coded format: what each rank sends, with the residuals that it keeps.
// Encoded and decoded by kernels/, whose own tests hold it to a scalar reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/zerocompute/model_chunks.h"
#include "kernels/kernels.h"
#include "transport/control/job_spec.h"

namespace phub {

// Its memory is the caller's, as a Checker's is. Elements count through the whole model, key after
// key, without padding.
class CodedSums {
 public:
  // Of a job whose keys have this format.
  struct Options {
    uint32_t ranks = 1;
    kernels::DType format = kernels::DType::kInt8;
    uint64_t pattern_first = 0;  // in the pattern of gradients.h
    std::vector<KeySpec> keys;
    uint32_t chunk_elements = 8192;
  };
  // Floats: the sums, and the residuals of all ranks.
  static size_t floats(uint64_t elements, uint32_t ranks) { return elements * (1 + ranks); }

  // REQUIRES: `memory` is zeroed and has as many floats as floats() says.
  CodedSums(const Options& options, float* memory);

  // Computes the sums of the chunks that begin in [first, first + n). REQUIRES: they are of the
  // round before.
  void advance(uint64_t round, uint64_t first, uint64_t n);
  const float* sums() const { return sums_; }

 private:
  void advance(uint64_t round, const ModelChunk& chunk);

  uint32_t ranks_;
  kernels::DType format_;
  uint64_t pattern_first_;
  ModelChunks chunks_;
  float* sums_;
  float* residuals_;  // rank after rank
  std::vector<float> gradient_;
  std::vector<std::byte> slots_;  // of a chunk, one of each rank
  std::vector<const void*> slot_of_rank_;
  size_t slot_stride_ = 0;
};

}  // namespace phub
