#include "kernels/whole_key.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kernels/whole_steps.h"

namespace phub::kernels {

bool takes_whole_keys(Optimizer o) { return o == Optimizer::kAdafactor || o == Optimizer::kMuon; }

WholeKey whole_key(Optimizer o, const Hyper& h, std::span<const uint64_t> shape,
                   uint64_t elements) {
  WholeKey key;
  key.columns = elements;
  const size_t dimensions = shape.size();
  const bool is_matrix = dimensions > 1;
  if (o == Optimizer::kMuon) {
    if (dimensions != 2 || h.ns_steps == 0) return key;
    key.rule = KeyRule::kOrthogonal;
  } else if (o == Optimizer::kAdafactor) {
    key.rule = KeyRule::kVariance;
    if (!is_matrix || shape[dimensions - 1] == 1 || shape[dimensions - 2] == 1) return key;
    key.rule = KeyRule::kFactored;
  }
  if (key.rule == KeyRule::kElements) return key;
  key.columns = shape[dimensions - 1];
  key.rows = shape[dimensions - 2];
  key.matrices = elements / (key.rows * key.columns);
  return key;
}

size_t state_elements(const WholeKey& key, size_t array) {
  if (key.rule == KeyRule::kElements) return key.elements();
  if (array > 0) return 0;
  if (key.rule == KeyRule::kFactored) return key.matrices * (key.rows + key.columns);
  return key.elements();
}

size_t scratch_elements(const WholeKey& key) {
  if (key.rule != KeyRule::kOrthogonal) return 0;
  const size_t shorter = std::min(key.rows, key.columns);
  return key.elements() + 2 * shorter * shorter;
}

double products_of(const WholeKey& key, const Hyper& h) {
  if (key.rule != KeyRule::kOrthogonal) return 0;
  const auto shorter = static_cast<double>(std::min(key.rows, key.columns));
  const auto longer = static_cast<double>(std::max(key.rows, key.columns));
  return h.ns_steps * shorter * shorter * (2 * longer + shorter);
}

KeyStep step_of_key(const WholeKey& key, const Hyper& h, uint64_t t, double squares,
                    const float* state, float* gradient, float* new_state, float* scratch) {
  switch (key.rule) {
    case KeyRule::kFactored:
    case KeyRule::kVariance:
      return adafactor_step(key, h, t, squares, state, gradient, new_state);
    case KeyRule::kOrthogonal:
      return muon_step(key, h, state, gradient, new_state, scratch);
    case KeyRule::kElements:
      break;
  }
  std::abort();
}

void apply_direction(const KeyStep& step, const float* direction, float* params, size_t elements) {
  for (size_t i = 0; i < elements; ++i) {
    const float kept = params[i] * step.decay;
    const float moved = direction[i] * step.scale;
    params[i] = canonical(kept + moved);
  }
}

}  // namespace phub::kernels
