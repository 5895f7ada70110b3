#include "bench/zerocompute/coded_sums.h"

#include "bench/zerocompute/gradients.h"
#include "kernels/encode.h"

namespace phub {

CodedSums::CodedSums(const Options& options, float* memory)
    : ranks_(options.ranks),
      format_(options.format),
      pattern_first_(options.pattern_first),
      chunks_(options.keys, options.chunk_elements) {
  sums_ = memory;
  residuals_ = memory + chunks_.elements();
  gradient_.resize(chunks_.largest());
  slot_stride_ = (kernels::slot_bytes(format_, chunks_.largest()) + 63) / 64 * 64;
  slots_.resize(slot_stride_ * ranks_);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    slot_of_rank_.push_back(slots_.data() + rank * slot_stride_);
  }
}

void CodedSums::advance(uint64_t round, uint64_t first, uint64_t n) {
  chunks_.visit(first, n, [&](const ModelChunk& chunk) { advance(round, chunk); });
}

void CodedSums::advance(uint64_t round, const ModelChunk& chunk) {
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    fill_gradients(rank, round, pattern_first_ + chunk.first, chunk.elements, kernels::DType::kF32,
                   gradient_.data());
    kernels::encode(gradient_.data(), residuals_ + rank * chunks_.elements() + chunk.first, format_,
                    {}, slots_.data() + rank * slot_stride_, chunk.elements);
  }
  kernels::sum(slot_of_rank_, format_, 1, sums_ + chunk.first, chunk.elements);
}

}  // namespace phub
