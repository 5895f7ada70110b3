#include "bench/zerocompute_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace phub {
namespace {

double quantile_of_sorted(std::span<const double> sorted, double q) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double place = std::clamp(q, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

}  // namespace

double quantile(std::span<const double> values, double q) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return quantile_of_sorted(sorted, q);
}

double median(std::span<const double> values) { return quantile(values, 0.5); }

double usual_mean(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.resize(sorted.size() - sorted.size() / 10);
  return std::accumulate(sorted.begin(), sorted.end(), 0.0) / static_cast<double>(sorted.size());
}

Summary summarize(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return {.min = quantile_of_sorted(sorted, 0),
          .p50 = quantile_of_sorted(sorted, 0.5),
          .p99 = quantile_of_sorted(sorted, 0.99),
          .max = quantile_of_sorted(sorted, 1),
          .total = std::accumulate(sorted.begin(), sorted.end(), 0.0)};
}

}  // namespace phub
