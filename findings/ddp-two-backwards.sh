#!/usr/bin/env bash
# DistributedDataParallel over gloo: one forward(), two losses, a backward() for each.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/two.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def step(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    said = "no error"
    try:
        out = net(torch.full((1, 4), 1.0 + rank))
        out.sum().backward(retain_graph=True)
        out.mul(2).sum().backward()
    except RuntimeError:
        said = "an error"
    # The mean over the ranks of 1 + rank is 1.5, of both losses 4.5.
    torch.save((said, net.module.weight.grad[0, 0].item()), f"{folder}/{rank}")
    dist.barrier()


if __name__ == "__main__":
    import sys

    mp.spawn(step, (sys.argv[1],), nprocs=2)
    (said, one), (_, two) = (torch.load(f"{sys.argv[1]}/{rank}") for rank in (0, 1))
    print(f"{torch.__version__.split('+')[0]}; {said}; gradients of the ranks {one:g} and {two:g}")
PYTHON
seen=$("$python" "$folder/two.py" "$folder" 2>"$errors")
verdict "the second backward() is an error (marked ready twice), or both ranks have 4.5" "$seen" \
  '2.13.0; no error; gradients of the ranks 3.5 and 5.5'
