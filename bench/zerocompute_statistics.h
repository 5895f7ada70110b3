// Order statistics of measured times.
#pragma once

#include <span>
#include <vector>

namespace phub {

// The value below which the fraction `q` (0 … 1) of the values lies, interpolated linearly between
// neighbours; NaN without values.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// The mean of all but the largest tenth: hiccups do not count, what comes again and again does. NaN
// without values.
double usual_mean(std::span<const double> values);

struct Summary {
  double min = 0, p50 = 0, p99 = 0, max = 0, total = 0;
};
Summary summarize(std::span<const double> values);

}  // namespace phub
