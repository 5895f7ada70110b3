// The ranks' view of the parameters, if results come back as differences: each round's, in a coded
// format, is added to it. The functions of kernels/, whose own tests hold them to a scalar
// reference, encode and decode it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/zerocompute/model_chunks.h"
#include "kernels/kernels.h"

namespace phub {

// Its memory is the caller's, as a Checker's is: a float for each element of the model, zeroed.
class View {
 public:
  View(kernels::DType format, std::span<const KeySpec> keys, uint32_t chunk_elements,
       float* memory);

  const ModelChunks& chunks() const { return chunks_; }
  const float* values() const { return values_; }
  // Called after a round. `parameters` are those of the whole model.
  void advance(uint64_t round, const ModelChunk& chunk, const float* parameters);

 private:
  kernels::DType format_;
  ModelChunks chunks_;
  float* values_;
  std::vector<float> difference_;
  std::vector<std::byte> slot_;
};

}  // namespace phub
