#!/usr/bin/env bash
# A table of embeddings of FBGEMM (TorchRec's) in a host's memory, with rowwise Adagrad. Of that its
# page says "support both L2 and decoupled weight decay", and of max_norm "the max norm value".
# Optimizers that a CPU does not have are errors.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install fbgemm-gpu-cpu==1.8.0 torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen, WeightDecayMode)


def row_after(steps, **settings):
    """The first two numbers of a row of ones, of which only the first has a gradient."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(1, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], learning_rate=0.1,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, **settings)
    (row,) = table.split_embedding_weights()[0]
    row.data.fill_(1)
    for _ in range(steps):
        found = table(torch.tensor([0]), torch.tensor([0, 1]))
        (found * torch.tensor([1.0, 0, 0, 0])).sum().backward()
    return ", ".join(f"{number:.3f}" for number in row[:2].tolist())


print("fbgemm-gpu-cpu", version("fbgemm-gpu-cpu"), "torch", torch.__version__.split("+")[0])
print("plain:", row_after(10))
for mode in (WeightDecayMode.L2, WeightDecayMode.DECOUPLE):
    decayed = row_after(10, weight_decay=0.5, weight_decay_mode=mode)
    print(f"weight_decay=0.5, {mode.name}:", decayed)
print("max_norm=0.1:", row_after(10, max_norm=0.1))
PYTHON
)
verdict 'with decay the second number is below 1, with max_norm the norm at most 0.1; or errors' \
  "$seen" \
  "fbgemm-gpu-cpu 1.8.0 torch 2.13.0
plain: -0.004, 1.000
weight_decay=0.5, L2: -0.004, 1.000
weight_decay=0.5, DECOUPLE: -0.004, 1.000
max_norm=0.1: -0.004, 1.000"
