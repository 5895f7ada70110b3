#!/usr/bin/env bash
# Numbers that are too large for a format that Pychop emulates, in NumPy and PyTorch. NumPy's
# float16 and ml_dtypes' float8 are the reference.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install pychop==0.6.2 ml_dtypes==0.6.0 torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import ml_dtypes
import numpy as np
import pychop
import torch

FORMATS = {
    "float16": (np.float16, 5, 10, [60000, 65519, 65520, 70000, 130000, 140000]),
    "float8_e4m3": (ml_dtypes.float8_e4m3, 4, 3, [240, 249, 300, 500, 600]),
}


def text(numbers):
    return " ".join(f"{float(number):g}" for number in numbers)


print("pychop", version("pychop"))
for name, (kind, exponent, fraction, numbers) in FORMATS.items():
    numbers = np.array(numbers, np.float32)
    print(f"{name}: {text(numbers.astype(kind))}")
    for backend, argument in (("numpy", numbers), ("torch", torch.tensor(numbers))):
        pychop.backend(backend)
        print(f"pychop, {backend}: {text(pychop.Chop(exponent, fraction)(argument))}")
PYTHON
)
verdict 'what is too large becomes infinity, as in the format' "$seen" \
  "pychop 0.6.2
float16: 60000 65504 inf inf inf inf
pychop, numpy: 60000 65504 65536 0 0 inf
pychop, torch: 60000 65504 65536 0 0 inf
float8_e4m3: 240 inf inf inf inf
pychop, numpy: 240 256 0 0 inf
pychop, torch: 240 256 0 0 inf"
