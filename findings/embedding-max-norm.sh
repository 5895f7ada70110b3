#!/usr/bin/env bash
# nn.Embedding(max_norm=…) under DistributedDataParallel over gloo. Its page says that forward()
# changes the weight in place; DistributedDataParallel's, that replicas stay the same.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/embed.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for max_norm in (None, 1.0):
        layer = torch.nn.Embedding(3, 1, max_norm=max_norm)
        torch.nn.init.constant_(layer.weight, 4.0)
        model = DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([rank])).sum().backward()  # rank 0 has token 0, rank 1 has token 1
            optimizer.step()
        weights = [torch.empty(3, 1) for _ in range(2)]
        dist.all_gather(weights, layer.weight.detach())
        if rank == 0:
            found = [[round(row, 2) for row in weight.flatten().tolist()] for weight in weights]
            print(f"max_norm={max_norm}: ranks have", *found)
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$python" -W ignore "$folder/embed.py" "$folder" 2>"$errors")
verdict 'ranks have the same weights after each step, or the layer is refused' "$seen" \
  "2.13.0
max_norm=None: ranks have [3.9, 3.9, 4.0] [3.9, 3.9, 4.0]
max_norm=1.0: ranks have [0.9, 3.9, 4.0] [3.9, 0.9, 4.0]"
