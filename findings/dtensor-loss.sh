#!/usr/bin/env bash
# Gradients of a model of DTensors, with its weights on every rank and the batch sharded over the
# ranks, by the loss. The documentation promises a program as for one device, which converges alike.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/loss.py" <<'PYTHON'
import copy
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn import functional as F

RANKS = 4
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "l1_loss": F.l1_loss,
    "mse_loss": F.mse_loss,
    "mse_loss(reduction='none').mean()": lambda x, y: F.mse_loss(x, y, reduction="none").mean(),
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model, inputs, numbers, classes = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2), torch.arange(8) % 2
    losses = {}
    for name, loss in LOSSES.items():
        targets = classes if name == "cross_entropy" else numbers
        plain, spread = copy.deepcopy(model), distribute_module(copy.deepcopy(model), mesh)
        expected = loss(plain(inputs), targets)
        found = loss(spread(distribute_tensor(inputs, mesh, [Shard(0)])), distribute_tensor(targets, mesh, [Shard(0)]))
        expected.backward()
        found.backward()
        assert torch.allclose(found.full_tensor(), expected)  # the loss itself is right
        factors = spread.weight.grad.full_tensor() / plain.weight.grad
        assert torch.allclose(factors, factors.mean(), rtol=1e-3)
        losses.setdefault(f"{factors.mean():.1f}", []).append(name)
    if rank == 0:
        for factor, names in losses.items():
            print(f"gradients {factor} times the right ones:", ", ".join(names))
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
PYTHON
seen=$("$python" -W ignore "$folder/loss.py" "$folder" 2>"$errors")
verdict 'over 4 ranks each loss has the gradient that it has in one process' "$seen" \
  "2.13.0
gradients 1.0 times the right ones: cross_entropy, l1_loss, mse_loss(reduction='none').mean(), binary_cross_entropy_with_logits
gradients 4.0 times the right ones: mse_loss, huber_loss, soft_margin_loss, binary_cross_entropy"
