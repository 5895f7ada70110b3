#!/usr/bin/env bash
# The maximum over ranks of which one has a NaN: all_reduce(MAX) of gloo, and what is built on it,
# and MPI_MAX of MPICH.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2

cat >"$folder/gloo.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

RANKS, NAN = 4, float("nan")


def clipped(rank, bad):
    """The norm that clip_grad_norm_ finds when all gradients of one rank's shard are NaN."""
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model)
    model(torch.ones(1, 8)).sum().backward()
    if rank == bad:
        model.weight.grad.to_local().fill_(NAN)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    return norm.full_tensor().item()


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    found, norms = [], []
    for bad in range(RANKS):
        mine = torch.tensor([NAN if rank == bad else rank + 1.0])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found.append(mine.item())
        norms.append(clipped(rank, bad))
    if rank == 0:
        print("gloo, NaN at rank 0, 1, 2, 3:", *found)
        print("FSDP2, clip_grad_norm_ with norm_type=inf:", *norms)
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
PYTHON

cat >"$folder/mpi.py" <<'PYTHON'
import numpy
from mpi4py import MPI

comm = MPI.COMM_WORLD
lines = []
for bad in range(comm.size):
    mine = numpy.array([numpy.nan if comm.rank == bad else comm.rank + 1], numpy.float32)
    largest = numpy.empty_like(mine)
    comm.Allreduce(mine, largest, MPI.MAX)
    lines.append(f"NaN at rank {bad}: ranks get " + " ".join(map(str, comm.allgather(float(largest[0])))))
if comm.rank == 0:
    print("MPICH", MPI.Get_library_version().split()[2])
    print(*lines, sep="\n")
PYTHON

gloo=$("$python" "$folder/gloo.py" "$folder" 2>"$errors")
mpi=$("$folder/environment/bin/mpiexec" -n 4 "$python" "$folder/mpi.py")
seen=$gloo$'\n'$mpi
verdict 'the maximum of 1, 2, 3, 4 with one of them NaN is NaN, or the largest of the others, for all ranks' "$seen" \
  "2.13.0
gloo, NaN at rank 0, 1, 2, 3: nan 1.0 2.0 3.0
FSDP2, clip_grad_norm_ with norm_type=inf: nan 1.0 1.0 1.0
MPICH 5.0.2
NaN at rank 0: ranks get 4.0 4.0 4.0 nan
NaN at rank 1: ranks get 4.0 4.0 nan 4.0
NaN at rank 2: ranks get 4.0 nan 4.0 2.0
NaN at rank 3: ranks get nan 3.0 2.0 3.0"
