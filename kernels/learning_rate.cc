#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/hyper.h"

namespace phub::kernels {
namespace {

// From 1 to lr_end, as `left` goes from 1 to 0.
double towards_end(const Hyper& h, double left) { return h.lr_end + (1 - h.lr_end) * left; }

double exponential(const Hyper& h, double n) { return std::pow(h.lr_exponential, n); }

double inverse(const Hyper& h, double n) {
  return std::pow(1 + h.lr_inverse * n, -h.lr_inverse_power);
}

double polynomial(const Hyper& h, double n) {
  const double done = std::min(n / h.lr_polynomial, 1.0);
  return towards_end(h, std::pow(1 - done, h.lr_polynomial_power));
}

double cosine(const Hyper& h, double n) {
  const double done = std::min(n / h.lr_cosine, 1.0);
  return towards_end(h, (1 + std::cos(std::numbers::pi * done)) / 2);
}

struct Schedule {
  double Hyper::*setting;
  double off;  // with this value there is no factor
  double (*factor)(const Hyper& h, double n);
};
constexpr Schedule kSchedules[] = {
    {&Hyper::lr_exponential, 1, exponential},
    {&Hyper::lr_inverse, 0, inverse},
    {&Hyper::lr_polynomial, 0, polynomial},
    {&Hyper::lr_cosine, 0, cosine},
};

}  // namespace

double learning_rate(const Hyper& hyper, uint64_t round) {
  const double before = std::max(static_cast<double>(round) - 1 + hyper.lr_rounds_before, 0.0);
  if (before < hyper.lr_warmup) {
    const double from = hyper.lr_warmup_from;
    return hyper.lr * (from + (1 - from) * (before / hyper.lr_warmup));
  }
  double rate = hyper.lr;
  for (const Schedule& schedule : kSchedules) {
    if (hyper.*schedule.setting == schedule.off) continue;
    rate *= schedule.factor(hyper, before - hyper.lr_warmup);
  }
  return std::isfinite(rate) ? rate : 0;  // infinity times a factor of 0, or what has no limit
}

}  // namespace phub::kernels
