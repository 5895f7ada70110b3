#include "worker/memory/gradient_rows.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "transport/error.h"

namespace phub {

std::vector<uint32_t> rows_in_order(const KeySpec& key, const GradientRows& rows) {
  if (!is_rows(key)) {
    fail(ErrorCode::kInvalid,
         "push_rows: of the gradient of key '{}' all rows are sent; to send those that are not "
         "zero the job must give it a rows_limit",
         key.name);
  }
  const std::span<const int64_t> indices = rows.indices;
  const uint64_t columns = key.shape[1];
  if (indices.size() > std::numeric_limits<uint32_t>::max() ||
      rows.elements.size() != indices.size() * columns) {
    fail(ErrorCode::kInvalid, "push_rows: {} rows of {} columns for key '{}' have {} elements",
         indices.size(), columns, key.name, rows.elements.size());
  }
  for (const int64_t index : indices) {
    if (index >= 0 && static_cast<uint64_t>(index) < key.shape[0]) continue;
    fail(ErrorCode::kInvalid, "push_rows: there is no row {} of key '{}', which has rows 0 to {}",
         index, key.name, key.shape[0] - 1);
  }
  std::vector<uint32_t> order(indices.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&indices](uint32_t i) { return indices[i]; });
  size_t different = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    different += i == 0 || indices[order[i]] != indices[order[i - 1]] ? 1 : 0;
  }
  if (different > key.rows_limit) {
    fail(ErrorCode::kInvalid,
         "push_rows: {} different rows for key '{}', whose rows_limit is {}: give the job a "
         "rows_limit of as many as a rank has in a round at most",
         different, key.name, key.rows_limit);
  }
  return order;
}

}  // namespace phub
