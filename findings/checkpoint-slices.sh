#!/usr/bin/env bash
# A PyTorch checkpoint of a part of a weight, as of some columns of a projection, read by tinygrad,
# whose torch_load() looks at strides to turn what is transposed. Another reader that passed over
# them: burn #5383.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 tinygrad==0.14.0 numpy==2.4.6

seen=$("$python" -W ignore - "$folder/weights.pt" 2>"$errors" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from tinygrad.nn.state import torch_load

print("torch", torch.__version__.split("+")[0], "tinygrad", version("tinygrad"))
weight = torch.arange(16.0).reshape(4, 4)
parts = {"first rows": weight[:2], "first columns": weight[:, :2], "every other row": weight[::2]}
torch.save(parts, sys.argv[1])
for name, read in torch_load(sys.argv[1]).items():
    rows = [" ".join(f"{number:.0f}" for number in row) for row in read.to("CPU").tolist()]
    saved = parts[name].tolist() == read.to("CPU").tolist()
    print(f"{name}:", ", ".join(rows), "as saved" if saved else "other numbers")
PYTHON
)
verdict 'a checkpoint has the numbers that were saved, or is refused' "$seen" \
  "torch 2.13.0 tinygrad 0.14.0
first rows: 0 1 2 3, 4 5 6 7 as saved
first columns: 0 1, 2 3, 4 5, 6 7 other numbers
every other row: 0 1 2 3, 4 5 6 7 other numbers"
