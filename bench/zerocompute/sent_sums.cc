#include "bench/zerocompute/sent_sums.h"

#include <algorithm>

#include "bench/zerocompute/compact_gradients.h"
#include "bench/zerocompute/gradients.h"
#include "kernels/encode.h"

namespace phub {

bool SentSums::needed(kernels::DType format, std::span<const KeySpec> keys) {
  return !kernels::is_plain(format) || std::ranges::any_of(keys, is_compact);
}

SentSums::SentSums(const Options& options, float* memory)
    : ranks_(options.ranks),
      format_(options.format),
      tree_(options.groups, options.ranks),
      pattern_first_(options.pattern_first),
      keys_(options.keys),
      chunks_(options.keys, options.chunk_elements) {
  sums_ = memory;
  residuals_ = memory + chunks_.elements();
  if (kernels::is_plain(format_)) return;
  gradient_.resize(chunks_.largest());
  slot_stride_ = (kernels::slot_bytes(format_, chunks_.largest()) + 63) / 64 * 64;
  slots_.resize(slot_stride_ * ranks_);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    slot_of_rank_.push_back(slots_.data() + rank * slot_stride_);
  }
}

void SentSums::advance(uint64_t round, uint64_t first, uint64_t n) {
  chunks_.visit(first, n, [&](const ModelChunk& chunk) { advance(round, chunk); });
}

void SentSums::advance(uint64_t round, const ModelChunk& chunk) {
  const KeySpec& key = keys_[chunk.key];
  if (is_factors(key)) return add_products(round, chunk);
  if (is_rows(key)) return add_rows(round, chunk);
  if (!kernels::is_plain(format_)) return add_coded(round, chunk);
  sum_of_gradients(ranks_, round, pattern_first_ + chunk.first, chunk.elements,
                   sums_ + chunk.first);
}

void SentSums::add_products(uint64_t round, const ModelChunk& chunk) {
  const KeySpec& key = keys_[chunk.key];
  const FactorsInPattern factors(key, pattern_first_ + chunk.first - chunk.begin);
  const size_t columns = key.shape[1], rows = chunk.elements / columns;
  std::vector<float> left(rows), right(columns);
  float* const out = sums_ + chunk.first;
  std::fill_n(out, chunk.elements, 0.0f);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    for (uint32_t pair = 0; pair < key.rank_limit; ++pair) {
      factors.fill_left(rank, round, pair, chunk.begin / columns, left);
      factors.fill_right(rank, round, pair, right);
      for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < columns; ++j) out[i * columns + j] += left[i] * right[j];
      }
    }
  }
}

void SentSums::draw_rows(uint64_t round, uint32_t key) {
  if (rows_round_ == round && rows_key_ == key) return;
  rows_.clear();
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    rows_.push_back(rows_of_rank(rank, round, key, keys_[key]));
  }
  rows_round_ = round;
  rows_key_ = key;
}

void SentSums::add_rows(uint64_t round, const ModelChunk& chunk) {
  draw_rows(round, chunk.key);
  const KeySpec& key = keys_[chunk.key];
  const size_t columns = key.shape[1];
  const auto begin = static_cast<int64_t>(chunk.begin / columns);
  const auto end = static_cast<int64_t>((chunk.begin + chunk.elements) / columns);
  std::vector<float> elements(columns);
  float* const out = sums_ + chunk.first;
  std::fill_n(out, chunk.elements, 0.0f);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const std::vector<int64_t>& rows = rows_[rank];
    for (auto row = std::ranges::lower_bound(rows, begin); row != rows.end() && *row < end; ++row) {
      const size_t at = static_cast<size_t>(*row - begin) * columns;
      fill_gradients(rank, round, pattern_first_ + chunk.first + at, columns, kernels::DType::kF32,
                     elements.data());
      for (size_t j = 0; j < columns; ++j) out[at + j] += elements[j];
    }
  }
}

void SentSums::add_coded(uint64_t round, const ModelChunk& chunk) {
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    fill_gradients(rank, round, pattern_first_ + chunk.first, chunk.elements, kernels::DType::kF32,
                   gradient_.data());
    kernels::encode(gradient_.data(), residuals_ + rank * chunks_.elements() + chunk.first, format_,
                    {}, slots_.data() + rank * slot_stride_, chunk.elements);
  }
  add_slots(0, {0, ranks_}, sums_ + chunk.first, chunk.elements);
}

// Of a group of this level of the tree: what its parts add up to, one after another.
void SentSums::add_slots(uint32_t level, RankRange ranks, float* out, size_t n) const {
  if (level + 1 == tree_.levels()) {
    kernels::sum(std::span(slot_of_rank_).subspan(ranks.first, ranks.size()), format_, 1, out, n);
    return;
  }
  std::vector<float> part(n);
  for (uint32_t first = ranks.first; first < ranks.end;) {
    const uint32_t end = tree_.end(level + 1, first);
    if (first == ranks.first) {
      add_slots(level + 1, {first, end}, out, n);
    } else {
      add_slots(level + 1, {first, end}, part.data(), n);
      for (size_t i = 0; i < n; ++i) out[i] += part[i];
    }
    first = end;
  }
}

}  // namespace phub
