#include "bench/zerocompute/view.h"

#include "kernels/encode.h"

namespace phub {

View::View(kernels::DType format, std::span<const KeySpec> keys, uint32_t chunk_elements,
           float* memory)
    : format_(format),
      chunks_(keys, chunk_elements),
      values_(memory),
      difference_(chunks_.largest()),
      slot_(kernels::slot_bytes(format, chunks_.largest())) {}

void View::advance(uint64_t round, const ModelChunk& chunk, const float* parameters) {
  float* const values = values_ + chunk.first;
  for (size_t i = 0; i < chunk.elements; ++i) {
    difference_[i] = parameters[chunk.first + i] - values[i];
  }
  kernels::encode(difference_.data(), nullptr, format_, {.round = round}, slot_.data(),
                  chunk.elements);
  kernels::decode(slot_.data(), format_, difference_.data(), chunk.elements);
  for (size_t i = 0; i < chunk.elements; ++i) values[i] += difference_[i];
}

}  // namespace phub
