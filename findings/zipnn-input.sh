#!/usr/bin/env bash
# The lossless compression of a model's weights, in memory, while the model goes on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 zipnn==0.5.4 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import torch
from zipnn import ZipNN

print("torch", torch.__version__.split("+")[0], "zipnn", version("zipnn"))
for kind in (torch.float32, torch.bfloat16, torch.float16):
    weights = torch.tensor([1, -2, 3, 0.5], dtype=kind).repeat(1000)
    before = weights.clone()
    compressed = ZipNN(input_format="torch").compress(weights)
    restored = ZipNN(input_format="torch").decompress(compressed)
    print(kind, "restored", torch.equal(restored, before), "kept", torch.equal(weights, before),
          "now", " ".join(f"{number:.2g}" for number in weights[:4].tolist()))
PYTHON
)
verdict 'compress() reads the tensor that it is given' "$seen" \
  "torch 2.13.0 zipnn 0.5.4
torch.float32 restored True kept False now 1.7e+38 -1.2e-38 -5.9e-39 4.3e+37
torch.bfloat16 restored True kept False now 1.7e+38 -1.2e-38 -5.9e-39 4.3e+37
torch.float16 restored True kept True now 1 -2 3 0.5"
