#!/usr/bin/env bash
# What one NaN in a gradient does to a parameter that Lion trains.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6 lion-pytorch==0.2.5

seen=$("$python" - <<'PYTHON'
from importlib.metadata import version

import numpy
import torch
from lion_pytorch import Lion

torch.set_num_threads(1)


def trained(make):
    """Two parameters from 1 towards 3, where step 3 of 500 has a NaN for the first."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = make([p])
    for step in range(1, 501):
        p.grad = 2 * (p.detach() - 3)
        if step == 3:
            p.grad[0] = float("nan")
        optimizer.step()
    first, second = p.tolist()
    return f"{first:.2f}, its neighbour {second:.2f}"


print(f"torch {torch.__version__.split('+')[0]}, lion-pytorch {version('lion-pytorch')}")
print("sign(NaN):", torch.sign(torch.tensor(float("nan"))).item(), "in torch,",
      numpy.sign(numpy.float32("nan")), "in NumPy")
print("AdamW:", trained(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0)))
print("Lion:", trained(lambda p: Lion(p, lr=0.01)))
PYTHON
)
verdict 'a NaN in a gradient makes the parameter NaN, and with it the loss, so somebody notices' "$seen" \
  "torch 2.13.0, lion-pytorch 0.2.5
sign(NaN): 0.0 in torch, nan in NumPy
AdamW: nan, its neighbour 2.99
Lion: 1.02, its neighbour 3.00"
