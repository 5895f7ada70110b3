#include "bench/zerocompute/coded_sums.h"

#include <algorithm>

#include "bench/zerocompute/gradients.h"
#include "kernels/encode.h"

namespace phub {

CodedSums::CodedSums(const Options& options, float* memory)
    : ranks_(options.ranks), format_(options.format), pattern_first_(options.pattern_first) {
  size_t largest = 0;
  for (const KeySpec& key : options.keys) {
    for (uint64_t done = 0; done < key.elements; done += options.chunk_elements) {
      const uint64_t count = std::min<uint64_t>(options.chunk_elements, key.elements - done);
      chunks_.push_back({elements_ + done, count});
      largest = std::max<size_t>(largest, count);
    }
    elements_ += key.elements;
  }
  sums_ = memory;
  residuals_ = memory + elements_;
  gradient_.resize(largest);
  slot_stride_ = (kernels::slot_bytes(format_, largest) + 63) / 64 * 64;
  slots_.resize(slot_stride_ * ranks_);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    slot_of_rank_.push_back(slots_.data() + rank * slot_stride_);
  }
}

void CodedSums::advance(uint64_t round, uint64_t first, uint64_t n) {
  const auto begin = std::ranges::lower_bound(chunks_, first, {}, &Chunk::first);
  for (auto at = begin; at != chunks_.end() && at->first < first + n; ++at) advance(round, *at);
}

void CodedSums::advance(uint64_t round, const Chunk& chunk) {
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    fill_gradients(rank, round, pattern_first_ + chunk.first, chunk.elements, kernels::DType::kF32,
                   gradient_.data());
    kernels::encode(gradient_.data(), residuals_ + rank * elements_ + chunk.first, format_, {},
                    slots_.data() + rank * slot_stride_, chunk.elements);
  }
  kernels::sum(slot_of_rank_, format_, 1, sums_ + chunk.first, chunk.elements);
}

}  // namespace phub
