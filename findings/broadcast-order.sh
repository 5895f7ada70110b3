#!/usr/bin/env bash
# A checkpoint that rank 0 has read, given to a model under FSDP2 on all ranks. A weight in it may
# lie in memory in another order: transposed (from a Conv1D of transformers), channels_last, or a
# part of a larger one. That broadcast() over gloo sends a tensor as it lies is known: pytorch
# #192920.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/load.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

NUMBERS = torch.arange(8.0).reshape(4, 2)
LARGER = torch.zeros(4, 4)
LARGER[:, :2] = NUMBERS
ORDERS = {"as it is made": NUMBERS, "transposed": NUMBERS.T.contiguous().T, "part of a larger one": LARGER[:, :2]}


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for name, weight in ORDERS.items():
        model = torch.nn.Linear(2, 4, bias=False)
        fully_shard(model)
        state = {"weight": weight} if rank == 0 else {}
        set_model_state_dict(
            model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        rows = model.weight.full_tensor().tolist()
        if rank == 0:
            print(f"{name}:", ", ".join(" ".join(f"{number:.0f}" for number in row) for row in rows))
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$python" -W ignore "$folder/load.py" "$folder" 2>"$errors")
verdict 'the model has the weight that rank 0 has, whatever the order of its memory' "$seen" \
  "2.13.0
as it is made: 0 1, 2 3, 4 5, 6 7
transposed: 0 1, 2 3, 1 3, 5 7
part of a larger one: 0 1, 2 3, 2 3, 0 0"
