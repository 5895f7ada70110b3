#!/usr/bin/env bash
# Two replicas with the same gradients, and bf16_stochastic_round of torchao's optimizers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6 torchao==0.18.0
export TORCHDYNAMO_DISABLE=1  # the steps as they are written, without a compiler

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
from importlib.metadata import version

import torch
from torchao.optim import _AdamW

torch.set_num_threads(1)


def replica(rank, stochastic):
    """Parameters after 100 steps with the gradients of all ranks, which are the same everywhere."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(10_000).bfloat16())
    gradients = torch.Generator().manual_seed(1)
    optimizer = _AdamW([parameter], 1e-3, bf16_stochastic_round=stochastic)
    torch.manual_seed(rank)  # as for dropout, or the order of the data
    for _ in range(100):
        parameter.grad = torch.randn(10_000, generator=gradients).bfloat16()
        optimizer.step()
    return parameter.detach()


parts = []
for stochastic in (False, True):
    part = (replica(1, stochastic) != replica(2, stochastic)).float().mean().item()
    parts.append(f"bf16_stochastic_round={stochastic}: {round(100 * part, -1):.0f}% differ")
print(f"torchao {version('torchao')}", *parts, sep="; ")
PYTHON
)
verdict 'equal gradients keep replicas equal, as with every optimizer' "$seen" \
  'torchao 0.18.0; bf16_stochastic_round=False: 0% differ; bf16_stochastic_round=True: 90% differ'
