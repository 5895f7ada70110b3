#!/usr/bin/env bash
# OpenFL's compression of updates. STC keeps the largest numbers, and sends their signs and the mean
# of their sizes (arXiv 1903.02891, algorithm 1); KC sends few different numbers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install openfl==1.9 numpy==2.4.6 scikit-learn==1.9.1

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import numpy as np
from openfl.pipelines import KCPipeline, STCPipeline


def sent(pipeline, numbers):
    return pipeline.backward(*pipeline.forward(np.array(numbers, np.float32)))


print("openfl", version("openfl"))
update = np.random.default_rng(0).normal(size=1000)
for part in (0.1, 0.01):
    largest = np.sort(np.abs(update))[-int(1000 * part):]
    found = sent(STCPipeline(p_sparsity=part), update)
    count = np.count_nonzero(found)
    print(f"STC, {part}: {count} of size {np.abs(found).max():.3f}, mean {largest.mean():.3f}")
print("KC of 1 1 2 2:", *(f"{number:g}" for number in sent(KCPipeline(n_clusters=2), [1, 1, 2, 2])))
PYTHON
)
verdict 'numbers of the size of the mean; and 1 1 2 2' "$seen" \
  "openfl 1.9
STC, 0.1: 100 of size 0.203, mean 2.033
STC, 0.01: 10 of size 0.031, mean 3.064
KC of 1 1 2 2: 2 2 2 2"
