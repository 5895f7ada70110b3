#include "worker/memory/factor_pairs.h"

#include <cstdint>

#include "transport/error.h"

namespace phub {

void check_factors(const KeySpec& key, std::span<const FactorPairs> factors) {
  if (!is_compact(key) || key.rank_limit == 0) {
    fail(
        ErrorCode::kInvalid,
        "push_factors: the gradient of key '{}' is sent as it is; to send its factors the job must "
        "give it a rank_limit",
        key.name);
  }
  uint64_t pairs = 0;
  for (const FactorPairs& part : factors) {
    if (part.pairs > 0 && (part.left == nullptr || part.right == nullptr)) {
      fail(ErrorCode::kInvalid, "push_factors: {} pairs of key '{}' are null", part.pairs,
           key.name);
    }
    pairs += part.pairs;
  }
  if (pairs <= key.rank_limit) return;
  fail(ErrorCode::kInvalid, "push_factors: {} pairs for key '{}', whose rank_limit is {}", pairs,
       key.name, key.rank_limit);
}

}  // namespace phub
