#!/usr/bin/env bash
# Prodigy and D-Adaptation, which find their step size by themselves, on parameters that FSDP2
# shards. Their pages: the optimizer detects sharded parameters if they are those of PyTorch.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 prodigyopt==1.1.2 dadaptation==3.2 numpy==2.4.6

cat >"$folder/size.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dadaptation import DAdaptAdam
from prodigyopt import Prodigy
from torch.distributed.fsdp import fully_shard

STEPS = 50


def trained(kind, shard):
    """The step size after some steps, which have the same batch on each rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    if shard:
        fully_shard(model)
    optimizer = kind(model.parameters(), lr=1.0)
    for step in range(STEPS):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()
    return float(optimizer.param_groups[0]["d"])


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for kind in (Prodigy, DAdaptAdam):
        size = trained(kind, False)
        sizes = [None, None]
        dist.all_gather_object(sizes, trained(kind, True))
        if rank == 0:
            ranks = "the same step size" if sizes[0] == sizes[1] else "different step sizes"
            right = all(abs(found / size - 1) < 0.01 for found in sizes)
            print(f"{kind.__name__}: ranks have {ranks},{'' if right else ' not'} that of one process")
            print(kind.__name__, size, sizes, file=sys.stderr)
    dist.barrier()


if __name__ == "__main__":
    print("prodigyopt", version("prodigyopt"), "dadaptation", version("dadaptation"))
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$python" -W ignore "$folder/size.py" "$folder" 2>"$errors" | grep -v '^Using decoupled')
verdict 'all ranks have the step size that one process has' "$seen" \
  "prodigyopt 1.1.2 dadaptation 3.2
Prodigy: ranks have different step sizes, not that of one process
DAdaptAdam: ranks have different step sizes, not that of one process"
