// The factors or rows of a matrix's gradient that ranks send: made of the pattern of gradients.h,
// so that their sums are exact in f32 in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

// The largest product is 64, and integers are exact in f32 up to 2^24.
inline constexpr uint64_t kMostPairsOfAllRanks = uint64_t{1} << 18;

// A key's pairs of vectors, rank_limit of each rank, are elements of the pattern: the left vectors
// one after another from that of the key's first element on, then the right ones.
class FactorsInPattern {
 public:
  // `first` is the key's first element in the pattern. REQUIRES: the key is sent as factors; it
  // outlives this.
  FactorsInPattern(const KeySpec& key, uint64_t first) : key_(key), first_(first) {}

  // Elements of the left vector of a pair, from row `from` on.
  void fill_left(uint32_t rank, uint64_t round, uint32_t pair, uint64_t from,
                 std::span<float> out) const;
  void fill_right(uint32_t rank, uint64_t round, uint32_t pair, std::span<float> out) const;

 private:
  const KeySpec& key_;
  const uint64_t first_;
};

// The rows of a key that a rank sends in a round: rows_limit different ones, at random, ascending.
// Their elements are those of the whole gradient. REQUIRES: it is sent as rows, and has so many.
std::vector<int64_t> rows_of_rank(uint32_t rank, uint64_t round, uint32_t key_index,
                                  const KeySpec& key);

}  // namespace phub
