#!/usr/bin/env bash
# PowerSGD as DDP's hook: one step has an infinite gradient, and a GradScaler leaves it out.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/train.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, BAD = 40, 5


def left_out(rank, name):
    """The number of steps that the scaler leaves out, when one of them has an infinite gradient."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    count = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).pow(2).mean()
        if step == BAD and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        count += scaler.get_scale() < scale
    return count


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    counts = [f"{name} {left_out(rank, name)}" for name in ("no hook", "fp16", "PowerSGD")]
    if rank == 0:
        print(torch.__version__.split("+")[0] + f"; of {STEPS} steps are left out:", ", ".join(counts))
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$python" "$folder/train.py" "$folder" 2>"$errors")
verdict 'one step is left out, with any hook' "$seen" \
  '2.13.0; of 40 steps are left out: no hook 1, fp16 1, PowerSGD 35'
