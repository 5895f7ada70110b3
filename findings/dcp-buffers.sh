#!/usr/bin/env bash
# A model under FSDP2 with BatchNorm, whose running statistics are each rank's own, in a distributed
# checkpoint. PyTorch's pages say that save() has each rank write its own shards, and nothing of
# tensors that are whole on every rank. DefaultSavePlanner's argument dedup_save_to_lowest_rank is
# not explained.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import BatchNorm1d, Linear, Sequential

RANKS = 4


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Sequential(Linear(4, 4), BatchNorm1d(4), Linear(4, 4), BatchNorm1d(4))
    fully_shard(model)
    model(torch.randn(64, 4) * (rank + 1) + rank)
    state = get_model_state_dict(model)
    names = [name for name in state if "running" in name]
    ranks = [None] * RANKS
    dist.all_gather_object(ranks, {name: state[name] for name in names})
    for word, planner in (("saved by default", None),
                          ("with dedup_save_to_lowest_rank", DefaultSavePlanner(dedup_save_to_lowest_rank=True))):
        dcp.save(state, checkpoint_id=f"{folder}/{word}", planner=planner)
        loaded = {name: torch.zeros(4) for name in names}
        dcp.load(loaded, checkpoint_id=f"{folder}/{word}")
        if rank == 0:
            whose = [next(r for r in range(RANKS) if torch.equal(ranks[r][name], loaded[name])) for name in names]
            print(f"{word}:", ", ".join(f"{name} of rank {r}" for name, r in zip(names, whose)))
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
PYTHON
seen=$("$python" -W ignore "$folder/save.py" "$folder" 2>"$errors")
verdict 'what is whole on every rank is saved by rank 0, or all of it by one rank' "$seen" \
  "2.13.0
saved by default: 1.running_mean of rank 1, 1.running_var of rank 2, 3.running_mean of rank 3, 3.running_var of rank 1
with dedup_save_to_lowest_rank: 1.running_mean of rank 0, 1.running_var of rank 0, 3.running_mean of rank 0, 3.running_var of rank 0"
