#!/usr/bin/env bash
# How DistributedDataParallel over gloo adds: in which order, and when it divides.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/bits.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

TINY = 2.0**-24  # the smallest float16


def gradients(rank, steps):
    """Of the same weights and the same batch in each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    torch.manual_seed(rank + 1)
    batch = torch.randn(16, 64)
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(batch).pow(2).mean().backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return seen


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    steps = gradients(rank, 4)
    others = ["no" if torch.equal(step, steps[0]) else "yes" for step in steps[1:]]
    tiny = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).half())
    tiny(torch.full((1, 1), TINY, dtype=torch.float16)).sum().backward()
    sums = torch.full((16,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(sums)
    if rank == 0:
        print(f"{ranks} ranks: other bits than in step 1:", *others, end="; ")
        print(f"mean of 6e-8 in float16: {tiny.module.weight.grad.item():.0e}", end="; ")
        ones = " + ".join(["1"] * (ranks - 1))
        print(f"256 + {ones} in bfloat16:", *(f"{number:g}" for number in sums.unique().tolist()))
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    for ranks in (2, 4):
        mp.spawn(run, (ranks, sys.argv[1]), nprocs=ranks)
PYTHON
seen=$("$python" "$folder/bits.py" "$folder" 2>"$errors")
verdict 'the same weights and batch have the same gradients in each step, and the mean of equal numbers is that number' "$seen" \
  "2.13.0
2 ranks: other bits than in step 1: no no no; mean of 6e-8 in float16: 0e+00; 256 + 1 in bfloat16: 256
4 ranks: other bits than in step 1: yes yes yes; mean of 6e-8 in float16: 0e+00; 256 + 1 + 1 + 1 in bfloat16: 256 260"
