#!/usr/bin/env bash
# SGD(fused=True) with parameters in bfloat16, on a CPU (pytorch #191763).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" - <<'PYTHON'
import torch


def changed(elements, dtype):
    """How many of the elements a step changes that should change all of them."""
    parameter = torch.nn.Parameter(torch.ones(elements, dtype=dtype))
    parameter.grad = torch.ones(elements, dtype=dtype)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return (parameter != 1).sum().item()


print(torch.__version__.split("+")[0], end="")
for elements in (8, 32, 100):
    print(f"; of {elements} in bfloat16 {changed(elements, torch.bfloat16)} change", end="")
print("; of 100 in float32", changed(100, torch.float32))
PYTHON
)
verdict 'a step changes every element' "$seen" \
  '2.13.0; of 8 in bfloat16 8 change; of 32 in bfloat16 0 change; of 100 in bfloat16 4 change; of 100 in float32 100'
