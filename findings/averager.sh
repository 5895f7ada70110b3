#!/usr/bin/env bash
# Local SGD with PyTorch's PeriodicModelAverager, when a rank's batch decides which layers have
# gradients, as in a mixture of experts. The documentation says that it averages the parameters that
# it is given.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/train.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

RANKS = 2


def weights(experts):
    """Of each rank, as text."""
    ranks = [None] * RANKS
    dist.all_gather_object(ranks, [expert.weight.item() for expert in experts])
    return ", ".join(f"rank {rank} has {first} and {second}" for rank, (first, second) in enumerate(ranks))


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    experts = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    for expert, value in zip(experts, (1.0, 100.0)):
        torch.nn.init.constant_(expert.weight, value)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2)
    for chosen in (experts, [experts[rank]], [experts[rank]]):  # it averages in the first and the third step
        optimizer.zero_grad()
        for expert in chosen:
            expert(torch.zeros(1, 1)).sum().backward()  # a gradient of 0
        optimizer.step()
        averager.average_parameters(experts.parameters())
        seen = weights(experts)
        if rank == 0:
            print("both used:" if chosen is experts else "one each:", seen)
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
PYTHON
seen=$("$python" -W ignore "$folder/train.py" "$folder" 2>"$errors")
verdict 'two layers that have 1 and 100 on each rank have 1 and 100 after averaging' "$seen" \
  "2.13.0
both used: rank 0 has 1.0 and 100.0, rank 1 has 1.0 and 100.0
one each: rank 0 has 1.0 and 100.0, rank 1 has 1.0 and 100.0
one each: rank 0 has 50.5 and 100.0, rank 1 has 1.0 and 50.5"
