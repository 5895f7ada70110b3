#!/usr/bin/env bash
# A distributed checkpoint in Hugging Face's format whose shards are put together when it is saved
# (enable_consolidation), of a model with a parameter without dimensions, such as the scale of
# CLIP's logits. The documentation says that the full tensors are saved.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

cat >"$folder/save.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = distribute_tensor(torch.arange(1.0, 4.0), mesh, [Shard(0)])
    state = {"weight": weight, "scale": torch.tensor(2.5), "scale_1d": torch.tensor([2.5])}
    saved = Path(folder, "saved")
    writer = HuggingFaceStorageWriter(str(saved), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    if rank == 0:
        for word, files in (("shards", saved.glob("sharded/*.safetensors")), ("whole", saved.glob("*.safetensors"))):
            found = [f"{name} {tensor.tolist()}" for file in sorted(files) for name, tensor in load_file(file).items()]
            print(f"{word}:", ", ".join(sorted(found)))
    dist.barrier()


if __name__ == "__main__":
    print(torch.__version__.split("+")[0])
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
PYTHON
seen=$("$python" -W ignore "$folder/save.py" "$folder" 2>"$errors")
verdict 'the file that is put together has the numbers of the shards' "$seen" \
  "2.13.0
shards: scale 2.5, scale_1d [2.5], weight [1.0, 2.0], weight [3.0]
whole: scale 0.0, scale_1d [2.5], weight [1.0, 2.0, 3.0]"
