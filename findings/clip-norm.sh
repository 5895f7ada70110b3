#!/usr/bin/env bash
# clip_grad_norm_ on a CPU: a norm that float16 cannot hold, and that of a long tensor in float32.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" - <<'PYTHON'
import torch

torch.set_num_threads(1)


def clip(gradient):
    """Clips it to the norm 1; returns the norm that was found."""
    parameter = torch.nn.Parameter(torch.empty_like(gradient))
    parameter.grad = gradient
    return torch.nn.utils.clip_grad_norm_([parameter], 1.0).item()


def norm(gradient):
    return sum(part.double().pow(2).sum().item() for part in gradient.split(1_000_000)) ** 0.5


print(torch.__version__.split("+")[0])
for number in (60, 70):
    gradient = torch.full((1_000_000,), number, dtype=torch.float16)
    clip(gradient)
    print(f"a million times {number} in float16: each is clipped to {gradient[0].item():.3f}")
for name, fill in (("normal numbers", torch.Tensor.normal_), ("0.01", lambda g: g.fill_(0.01))):
    for elements in (1_000_000, 100_000_000):
        torch.manual_seed(0)
        gradient = fill(torch.empty(elements))
        right = norm(gradient)
        error = round(100 * (clip(gradient) / right - 1))
        print(f"{name}, {elements} times, in float32: the norm is wrong by {error}%")
PYTHON
)
verdict 'gradients are scaled to the norm 1, to some digits: of a million equal ones each becomes 0.001' "$seen" \
  "2.13.0
a million times 60 in float16: each is clipped to 0.001
a million times 70 in float16: each is clipped to 0.000
normal numbers, 1000000 times, in float32: the norm is wrong by 0%
normal numbers, 100000000 times, in float32: the norm is wrong by -1%
0.01, 1000000 times, in float32: the norm is wrong by 0%
0.01, 100000000 times, in float32: the norm is wrong by 6%"
