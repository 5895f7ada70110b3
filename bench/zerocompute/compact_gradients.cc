#include "bench/zerocompute/compact_gradients.h"

#include <random>

#include "bench/zerocompute/gradients.h"
#include "transport/error.h"

namespace phub {

void FactorsInPattern::fill_left(uint32_t rank, uint64_t round, uint32_t pair, uint64_t from,
                                 std::span<float> out) const {
  fill_gradients(rank, round, first_ + pair * key_.shape[0] + from, out.size(),
                 kernels::DType::kF32, out.data());
}

void FactorsInPattern::fill_right(uint32_t rank, uint64_t round, uint32_t pair,
                                  std::span<float> out) const {
  const uint64_t right = first_ + key_.rank_limit * key_.shape[0];
  fill_gradients(rank, round, right + pair * key_.shape[1], out.size(), kernels::DType::kF32,
                 out.data());
}

std::vector<int64_t> rows_of_rank(uint32_t rank, uint64_t round, uint32_t key_index,
                                  const KeySpec& key) {
  const uint64_t rows = key.shape[0];
  PHUB_CHECK(key.rows_limit <= rows);
  std::seed_seq seed{uint64_t{rank}, round, uint64_t{key_index}};
  std::mt19937 random(seed);
  std::vector<int64_t> chosen;
  chosen.reserve(key.rows_limit);
  // Of the rows that are left each is as likely as any other (Knuth, volume 2, algorithm S).
  for (uint64_t row = 0; chosen.size() < key.rows_limit; ++row) {
    const uint64_t still = key.rows_limit - chosen.size();
    if (random() % (rows - row) < still) chosen.push_back(static_cast<int64_t>(row));
  }
  return chosen;
}

}  // namespace phub
