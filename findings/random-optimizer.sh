#!/usr/bin/env bash
# Optimizers of the package pytorch_optimizer under DistributedDataParallel over gloo, each rank
# with a seed of its own, as dropout needs it. DistributedDataParallel never sends parameters again.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 pytorch_optimizer==4.1.0 numpy==2.4.6

cat >"$folder/drift.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_optimizer import load_optimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def drift(name, rank):
    """By how much ranks' parameters differ in the end, as part of the largest one."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = load_optimizer(name)(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 2 + rank)
        inputs = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    return ((mine - first).abs().max() / first.abs().max()).item()


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for name in ("adamw", "shampoo", "soap", "kron", "magma"):
        found = drift(name, rank)
        if rank == 1:
            large = "differ by more than 1%" if found > 0.01 else f"differ by {found}"
            print(f"{name}: ranks", large if found else "have the same parameters")
    dist.barrier()


if __name__ == "__main__":
    print("pytorch_optimizer", version("pytorch_optimizer"))
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$python" -W ignore "$folder/drift.py" "$folder" 2>"$errors")
verdict 'ranks that begin alike and have the same gradients stay the same' "$seen" \
  "pytorch_optimizer 4.1.0
adamw: ranks have the same parameters
shampoo: ranks have the same parameters
soap: ranks have the same parameters
kron: ranks differ by more than 1%
magma: ranks differ by more than 1%"
