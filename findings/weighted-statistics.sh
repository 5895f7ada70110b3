#!/usr/bin/env bash
# Statistics of scikit-learn-intelex with weights, in one call and in two, beside NumPy's mean.
# Its page says of sample_weight: "Weights for compute weighted statistics".
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install scikit-learn-intelex==2026.2.0 scikit-learn==1.9.1 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import numpy as np
from sklearnex.basic_statistics import BasicStatistics, IncrementalBasicStatistics

NAMES = ("mean", "min", "max")
numbers = np.array([[1.0], [3.0], [5.0]])
weights = np.array([2.0, 2.0, 4.0])

print("scikit-learn-intelex", version("scikit-learn-intelex"))
print(f"NumPy: mean {np.average(numbers[:, 0], weights=weights):g}, min 1, max 5")
options = list(NAMES)
whole = BasicStatistics(result_options=options).fit(numbers, sample_weight=weights)
parts = IncrementalBasicStatistics(result_options=options)
for part in (slice(0, 2), slice(2, 3)):
    parts.partial_fit(numbers[part], sample_weight=weights[part])
for title, found in (("one call", whole), ("two calls", parts)):
    print(f"{title}:", ", ".join(f"{name} {getattr(found, name + '_')[0]:.3g}" for name in NAMES))
PYTHON
)
verdict 'the weighted mean is that of NumPy; weights do not change min and max' "$seen" \
  "scikit-learn-intelex 2026.2.0
NumPy: mean 3.5, min 1, max 5
one call: mean 9.33, min 2, max 20
two calls: mean 9.33, min 2, max 20"
